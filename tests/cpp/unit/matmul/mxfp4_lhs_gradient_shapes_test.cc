#include "ffi/device/matmul/sm90/mxfp4_lhs_gradient_shapes.h"

#include <cstdint>
#include <set>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep::sm90 {
namespace {

// Four bits of a weight, and eight of a scale, for each k and column of a k-block.
uint32_t Nibble(int k, int column) { return (k * 7 + column * 5 + k * column / 3) % 16; }
uint32_t Scale(int k, int block) { return (k * 11 + block * 37) % 120; }

// Writes a k-block's weights as TMA does, with the 64-byte swizzle.
std::vector<uint8_t> MakeWeights() {
  std::vector<uint8_t> bytes(kLhsGradientWeightsBytes);
  for (int k = 0; k < kTileK; ++k) {
    for (int column = 0; column < kSwappedColumns; ++column) {
      int at = k * kLhsGradientLineBytes + column / 2;
      at ^= (at >> 7 & 3) << 4;
      bytes[at] |= Nibble(k, column) << (column % 2 * 4);
    }
  }
  return bytes;
}

// Returns what ldmatrix with .trans gives a lane of matrix `i`: rows 2 * (lane % 4) and the next of
// its column lane / 4. Lane 8 * i + r passes the address of row r.
uint32_t LoadTransposed(const std::vector<uint8_t>& bytes, int warp, int lane, int half, int i) {
  uint32_t word = 0;
  for (int j = 0; j < 2; ++j) {
    const int row = lane % 4 * 2 + j;
    const int at = LhsGradientWeightsOffset(warp, 8 * i + row) +
                   half * kLhsGradientWeightsBytes / 2 + lane / 4 * 2;
    word |= uint32_t{bytes[at]} << 16 * j | uint32_t{bytes[at + 1]} << (16 * j + 8);
  }
  return word;
}

// Word 4 * s + 2 * j + h of wgmma's A is k 16 * s + 8 * j + 2 * (lane % 4) and the next.
void TestWeights() {
  const std::vector<uint8_t> bytes = MakeWeights();
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 8; ++matrix) {
        const uint32_t word = LoadTransposed(bytes, warp, lane, matrix / 4, matrix % 4) >>
                              LhsGradientPair(warp, lane) * 4;
        for (int h = 0; h < 2; ++h) {
          const int k = matrix * 8 + lane % 4 * 2;
          const int column = LhsGradientColumn(warp, lane) + h;
          CHECK(ExpandMxFp4(word, h) ==
                ExpandMxFp4(Nibble(k, column) | Nibble(k + 1, column) << 4));
        }
      }
    }
  }
}

// A lane reads the factors of its k as eight words that follow each other.
void TestFactors() {
  std::vector<uint32_t> words(kHighFactorsAt / 4);
  for (int block = 0; block < kFactorBlocks; ++block) {
    for (int pair = 0; pair < kTileK / 2; ++pair) {
      words[FactorOffset(block, pair) / 4] = Scale(2 * pair, block) | Scale(2 * pair + 1, block)
                                                                          << 16;
    }
  }
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const int first = FactorOffset(warp / 2, lane % 4);
      CHECK(first % 16 == 0);
      for (int matrix = 0; matrix < 8; ++matrix) {
        const int k = matrix * 8 + lane % 4 * 2;
        const int block = LhsGradientColumn(warp, lane) / kMxFp4Block;
        CHECK(words[first / 4 + matrix] == (Scale(k, block) | Scale(k + 1, block) << 16));
      }
    }
  }
}

// All columns of a tile belong to a lane each, those of a warpgroup to its 64.
void TestColumns() {
  std::set<int> columns;
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    for (int lane = 0; lane < 32; lane += 4) {
      const int column = LhsGradientColumn(warp, lane);
      CHECK(column % 2 == 0 && column / kColumnBlock == warp / kWarpgroupWarps);
      columns.insert(column);
      for (int other = 0; other < 4; ++other) {
        CHECK(LhsGradientColumn(warp, lane + other) == column);
      }
    }
  }
  CHECK(columns.size() == kSwappedColumns / 2);
}

// The words that a warp stages at once, pairs of columns in lines of 128 bytes with TMA's swizzle,
// lie in different banks.
void TestBanks() {
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    for (int i = 0; i < 2; ++i) {
      std::set<int> banks;
      for (int lane = 0; lane < 32; ++lane) {
        const int row = lane % 4 * 2 + i;
        const int byte = LhsGradientColumn(warp, lane) % kColumnBlock * 2 ^ row * 16;
        banks.insert(byte / 4);
      }
      CHECK(banks.size() == 32);
    }
  }
}

}  // namespace
}  // namespace jax_ep::sm90

int main() {
  jax_ep::sm90::TestWeights();
  jax_ep::sm90::TestFactors();
  jax_ep::sm90::TestColumns();
  jax_ep::sm90::TestBanks();
  return jax_ep::testing::Finish();
}
