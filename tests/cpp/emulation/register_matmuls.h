// The 16-bit grouped matmul kernels for sm_90a.
#ifndef JAX_EP_TESTS_CPP_EMULATION_REGISTER_MATMULS_H_
#define JAX_EP_TESTS_CPP_EMULATION_REGISTER_MATMULS_H_

void RegisterMatmuls();

#endif  // JAX_EP_TESTS_CPP_EMULATION_REGISTER_MATMULS_H_
