"""Files that are read, saved and read again: bits, shards, blocks in eight bits, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile

import testing  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from jax_ep import checkpoints
from jax_ep._src.checkpoints.files import File, Shape
from jax_ep._src.checkpoints.tensors import INDEX, Tensors

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "checkpoints"
FAMILIES = sorted(path.name for path in FOLDER.iterdir())
SIZES = {"hidden_size": 160, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
V3 = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def mesh():
    return testing.mesh_of(testing.fit((2, 4)), ("data", "expert"))


def read(folder):
    tensors = Tensors(pathlib.Path(folder))
    return {name: np.asarray(tensors.view(name)) for name in tensors}


def write(folder, tensors, config):
    file = File(
        folder / "model.safetensors", {n: Shape(t.shape, t.dtype) for n, t in tensors.items()}
    )
    for name, values in tensors.items():
        file.write(name, values)
    file.finish()
    (folder / "config.json").write_text(json.dumps(config))


def blocks(size, scale_dtype):
    """Tensors of DeepSeek-V3 in blocks of 128 x 128, and the floats that they stand for."""
    rng, block = np.random.default_rng(0), "model.layers.0.mlp."
    tensors = {
        f"{block}gate.weight": rng.normal(size=(8, 160)).astype(np.float32),
        f"{block}gate.e_score_correction_bias": rng.normal(size=8).astype(np.float32),
    }
    floats = {}
    for module in [*(f"experts.{e}" for e in range(8)), "shared_experts"]:
        for name, shape in ("gate", (size, 160)), ("up", (size, 160)), ("down", (160, size)):
            full = f"{block}{module}.{name}_proj.weight"
            values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
            grid = [-(-s // 128) for s in shape]
            scales = (2.0 ** rng.integers(-3, 3, grid)).astype(scale_dtype)
            whole = np.kron(scales.astype(np.float64), np.ones((128, 128)))
            whole = whole[: shape[0], : shape[1]] * values.astype(np.float64)
            tensors |= {full: values, f"{full}_scale_inv": scales}
            floats[full] = whole.astype(jnp.bfloat16)
    return tensors, floats


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def assert_same(self, given, expected):
        self.assertEqual(sorted(given), sorted(expected))
        for name, values in given.items():
            self.assertEqual(values.dtype, expected[name].dtype, name)
            testing.assert_bitwise(values, expected[name], name)


class SaveTest(FolderTest):
    @parameterized.parameters(*FAMILIES)
    def test_bits(self, family):
        loaded = checkpoints.load(FOLDER / family, mesh=mesh(), fsdp_axis="data")
        checkpoints.save(self.folder, loaded, max_file_bytes=60_000)
        source = read(FOLDER / family)
        self.assert_same(
            read(self.folder), {n: v for n, v in source.items() if n not in loaded.ignored}
        )
        index = json.loads((self.folder / INDEX).read_text())
        total = sum(v.nbytes for n, v in source.items() if n not in loaded.ignored)
        self.assertEqual(index["metadata"]["total_size"], total)
        self.assertEqual(
            json.loads((self.folder / "config.json").read_text()),
            json.loads((FOLDER / family / "config.json").read_text()),
        )

    def test_four_bits_become_bfloat16(self):
        loaded = checkpoints.load(FOLDER / "gpt_oss_mxfp4", mesh=mesh(), dequantize=True)
        checkpoints.save(self.folder, loaded)
        again = checkpoints.load(self.folder, mesh=mesh())
        self.assertNotIn("quantization_config", again.config)
        for name, values in loaded.layers[0].items():
            testing.assert_bitwise(values, again.layers[0][name], name)

    def test_a_stack(self):
        given = FOLDER / "olmoe"
        apart, stack = (checkpoints.load(given, mesh=mesh(), stacked=s) for s in (False, True))
        for name, values in stack.layers[0].items():
            for i in range(2):
                testing.assert_bitwise(values[i], apart.layers[i][name], name)
        checkpoints.save(self.folder, stack)
        self.assert_same(read(self.folder), read(given))

    def test_padding_is_left_out(self):
        loaded = checkpoints.load(FOLDER / "qwen3_moe", mesh=testing.expert_mesh(4))
        self.assertEqual(loaded.layers[0]["w_up"].shape[0], 8)  # six experts
        self.assertFalse(loaded.layers[0]["w_up"][6:].any())

    def test_refuses(self):
        loaded = checkpoints.load(FOLDER / "olmoe")
        with self.assertRaisesRegex(ValueError, "has a checkpoint already"):
            checkpoints.save(FOLDER / "olmoe", loaded)
        layers = {0: loaded.layers[0] | {"w_down": jnp.ones((8, 32, 16))}, 1: loaded.layers[1]}
        with self.assertRaisesRegex(ValueError, "w_down of layer 0 has the shape"):
            checkpoints.save(self.folder, dataclasses.replace(loaded, layers=layers))


class BlocksTest(FolderTest):
    @parameterized.parameters(np.float32, jnp.bfloat16, jnp.float8_e8m0fnu)
    def test_stay(self, dtype):
        tensors, floats = blocks(128, dtype)
        write(self.folder, tensors, V3)
        loaded = checkpoints.load(self.folder, mesh=mesh())
        # numpy slices: XLA's on CPUs make 0 of E4M3's -0
        up, down = jax.tree.map(np.asarray, [w.forward for w in loaded.quantized[0]])
        block = "model.layers.0.mlp."
        for e in range(8):
            for i, name in enumerate(("gate", "up")):
                full = f"{block}experts.{e}.{name}_proj.weight"
                testing.assert_bitwise(up.values[e, 128 * i :][:128], tensors[full])
                scales = tensors[f"{full}_scale_inv"].astype(np.float32)
                testing.assert_bitwise(up.scales[e, i : i + 1], scales)
            testing.assert_bitwise(down.values[e], tensors[f"{block}experts.{e}.down_proj.weight"])
        shared = floats[f"{block}shared_experts.down_proj.weight"]
        testing.assert_bitwise(loaded.layers[0]["shared_w_down"], shared.T)
        checkpoints.save(self.folder / "saved", loaded)
        of_shared = {n for n in tensors if "shared" in n}
        expected = {n: v for n, v in tensors.items() if n not in of_shared}
        expected |= {n: v for n, v in floats.items() if n in of_shared}
        self.assert_same(read(self.folder / "saved"), expected)

    @parameterized.parameters(128, 96)
    def test_dequantized(self, size):
        tensors, floats = blocks(size, np.float32)
        write(self.folder, tensors, V3 | {"moe_intermediate_size": size})
        if size % 128:
            with self.assertWarnsRegex(UserWarning, f"experts have F={size}"):
                loaded = checkpoints.load(self.folder, mesh=mesh())
        else:
            loaded = checkpoints.load(self.folder, mesh=mesh(), dequantize=True)
        self.assertEmpty(loaded.quantized)
        checkpoints.save(self.folder / "saved", loaded)
        kept = {n: v for n, v in tensors.items() if ".gate." in n}
        self.assert_same(read(self.folder / "saved"), kept | floats)
        self.assertNotIn("quantization_config", (self.folder / "saved/config.json").read_text())


class LoadTest(FolderTest):
    def test_shards_and_bytes(self):
        loaded = checkpoints.load(FOLDER / "mixtral", mesh=mesh(), fsdp_axis="data")
        alone = checkpoints.load(FOLDER / "mixtral")
        self.assertEqual(
            loaded.bytes_read, sum(v.nbytes for v in read(FOLDER / "mixtral").values())
        )
        self.assertEqual(loaded.bytes_read, alone.bytes_read)
        w_up = loaded.layers[1]["w_up"]
        self.assertEqual(w_up.sharding.shard_shape(w_up.shape), (2, 16, 2, 24))
        for name, values in loaded.layers[1].items():
            testing.assert_bitwise(values, alone.layers[1][name], name)

    def test_dtypes(self):
        params = checkpoints.load(FOLDER / "deepseek_v3", dtype=jnp.float16).layers[1]
        self.assertEqual(params["w_up"].dtype, jnp.float16)
        self.assertEqual(params["router_kernel"].dtype, jnp.float32)
        self.assertEqual(params["selection_bias"].dtype, jnp.float32)

    def test_ignored_and_left_out(self):
        source = read(FOLDER / "deepseek_v3")
        extra = {
            "model.layers.2.eh_proj.weight": np.ones(2, np.float32),
            "mtp.norm.weight": np.ones(2, np.float32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        }
        config = json.loads((FOLDER / "deepseek_v3/config.json").read_text())
        write(self.folder, source | extra, config)
        choose = lambda name, shape: None if name == "lm_head.weight" else jax.P()
        loaded = checkpoints.load(self.folder, other=choose)
        self.assertEqual({*loaded.ignored}, {*extra, "lm_head.weight"})
        self.assertIn("model.layers.0.mlp.up_proj.weight", loaded.other)  # a dense layer

    def test_refuses(self):
        given = FOLDER / "minimax_m2"
        config, source = json.loads((given / "config.json").read_text()), read(given)
        with self.assertRaisesRegex(ValueError, "'GemmaForCausalLM' is not known; .*Mixtral"):
            checkpoints.moe_options(config | {"architectures": ["GemmaForCausalLM"]})
        gate = "model.layers.0.block_sparse_moe.gate.weight"
        write(self.folder, {n: v for n, v in source.items() if n != gate}, config)
        with self.assertRaisesRegex(ValueError, rf"lacks {gate}.*\(4, 32\)"):
            checkpoints.load(self.folder)
        write(self.folder, source | {gate: source[gate][:, :5]}, config)
        with self.assertRaisesRegex(ValueError, rf"{gate} have the shapes \[\(4, 5\)\].*\(4, 32\)"):
            checkpoints.load(self.folder)
        path = self.folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with self.assertRaisesRegex(ValueError, "as many as its safetensors header"):
            checkpoints.load(self.folder)
        shutil.copy(FOLDER / "mixtral" / INDEX, self.folder)
        with self.assertRaisesRegex(ValueError, "does not exist"):
            checkpoints.load(self.folder)


if __name__ == "__main__":
    absltest.main()
