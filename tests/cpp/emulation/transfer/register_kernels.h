#ifndef JAX_EP_TESTS_CPP_EMULATION_TRANSFER_REGISTER_KERNELS_H_
#define JAX_EP_TESTS_CPP_EMULATION_TRANSFER_REGISTER_KERNELS_H_

// Makes the transfer kernels known to the emulated CUDA runtime, and their architecture that of its
// devices. Called before all else.
void RegisterKernels();

#endif  // JAX_EP_TESTS_CPP_EMULATION_TRANSFER_REGISTER_KERNELS_H_
