# The Python module, with the CUDA handlers if there is a CUDA compiler.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_ffi STABLE_ABI NB_STATIC NB_SUPPRESS_WARNINGS ffi/bindings.cc
                    ffi/old_glibc.cc)
target_link_libraries(_ffi PRIVATE jax_ep_runtime)
# Symbols of static libraries (the CUDA runtime's above all) stay inside.
target_link_options(_ffi PRIVATE -Wl,--exclude-libs,ALL)
# The machine that loads the module may have an older libstdc++, and a glibc whose threads, dlopen and
# shm_open are in libraries of their own (ffi/old_glibc.cc). Some distributions package the static
# libstdc++ apart: without it the module serves machines like this one.
set(portable -static-libstdc++ -Wl,--push-state,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2
             -l:librt.so.1 -Wl,--pop-state)
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LINK_OPTIONS ${portable})
check_cxx_source_compiles("#include <iostream>
                           int main() { std::cout << 1; }" JAX_EP_LINKS_PORTABLY)
unset(CMAKE_REQUIRED_LINK_OPTIONS)
if(JAX_EP_LINKS_PORTABLY)
  target_link_options(_ffi PRIVATE ${portable})
endif()
target_compile_definitions(
  _ffi PRIVATE JAX_EP_VERSION="${JAX_EP_VERSION}"
               JAX_EP_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")

if(JAX_EP_WITH_CUDA)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import jax.ffi; print(jax.ffi.include_dir())"
    OUTPUT_VARIABLE xla_headers
    ERROR_VARIABLE problem
    RESULT_VARIABLE failed
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "jax_ep: building the CUDA handlers needs JAX in ${Python_EXECUTABLE}: "
                        "pip install jax, or set JAX_EP_CUDA=OFF.\n${problem}")
  endif()

  add_library(
    jax_ep_cuda STATIC
    # Takes longest by far: first, so that no core waits for it at the end.
    ffi/kernels/matmul/portable/grouped_matmul_16bit.cu
    ffi/handlers/call.cc
    ffi/handlers/matmul/grouped_matmul.cc
    ffi/handlers/matmul/grouped_matmul_activation.cc
    ffi/handlers/matmul/grouped_matmul_mxfp4.cc
    ffi/handlers/matmul/grouped_matmul_mxfp4_activation.cc
    ffi/handlers/matmul/grouped_matmul_quantized.cc
    ffi/handlers/matmul/grouped_matmul_quantized_activation.cc
    ffi/handlers/matmul/grouped_matmul_quantized_rhs_gradient.cc
    ffi/handlers/operations.cc
    ffi/handlers/quantize/quantize.cc
    ffi/handlers/quantize/quantize_activation_gradient.cc
    ffi/handlers/quantize/quantize_both.cc
    ffi/handlers/quantize/quantize_transposed.cc
    ffi/handlers/quantize/quantize_weights.cc
    ffi/handlers/targets.cc
    ffi/handlers/transfer/bulk_copy_ceiling.cc
    ffi/handlers/transfer/combine.cc
    ffi/handlers/transfer/dispatch.cc
    ffi/handlers/transfer/redispatch.cc
    ffi/handlers/transfer/transfer.cc
    ffi/handlers/transfer/transfer_done.cc
    ffi/kernels/matmul/family.cc
    ffi/kernels/matmul/grouped_matmul.cc
    ffi/kernels/matmul/grouped_matmul_activation.cc
    ffi/kernels/matmul/grouped_matmul_fp8.cc
    ffi/kernels/matmul/grouped_matmul_fp8_rhs_gradient.cc
    ffi/kernels/matmul/grouped_matmul_mxfp4.cc
    ffi/kernels/matmul/launch.cc
    ffi/kernels/matmul/portable/activation_gradient.cu
    ffi/kernels/matmul/portable/family.cc
    ffi/kernels/matmul/portable/grouped_matmul_float32.cu
    ffi/kernels/matmul/sm90/grouped_matmul_rhs_gradient.cu
    ffi/kernels/matmul/sm90/grouped_matmul_fp8.cu
    ffi/kernels/matmul/sm90/grouped_matmul_fp8_rhs_gradient.cu
    ffi/kernels/matmul/sm90/grouped_matmul_mxfp4.cu
    ffi/kernels/matmul/sm90/grouped_matmul_mxfp4_activation.cu
    ffi/kernels/matmul/sm90/grouped_matmul_mxfp4_decode.cu
    ffi/kernels/matmul/sm90/grouped_matmul_mxfp4_lhs_gradient.cu
    ffi/kernels/matmul/sm90/grouped_matmul_swapped.cu
    ffi/kernels/matmul/sm90/make_tensor_map.cc
    ffi/kernels/matmul/sm90/matmul_16bit.cc
    ffi/kernels/matmul/sm90/matmul_fp8.cc
    ffi/kernels/matmul/sm90/matmul_mxfp4.cc
    ffi/kernels/nvshmem/cubin.cc
    ffi/kernels/nvshmem/use_nvshmem.cc
    ffi/kernels/probe.cu
    ffi/kernels/quantize/quantize.cc
    ffi/kernels/quantize/quantize.cu
    ffi/kernels/quantize/quantize_activation_gradient.cc
    ffi/kernels/quantize/quantize_activation_gradient.cu
    ffi/kernels/quantize/quantize_transposed.cc
    ffi/kernels/quantize/quantize_transposed.cu
    ffi/kernels/quantize/quantize_weights.cc
    ffi/kernels/quantize/quantize_weights.cu
    ffi/kernels/transfer/bulk_copy_ceiling.cc
    ffi/kernels/transfer/bulk_copy_ceiling.cu
    ffi/kernels/transfer/combine.cc
    ffi/kernels/transfer/combine.cu
    ffi/kernels/transfer/dispatch.cc
    ffi/kernels/transfer/dispatch.cu
    ffi/kernels/transfer/load.cc
    ffi/kernels/transfer/hierarchical/combine.cu
    ffi/kernels/transfer/hierarchical/dispatch.cu
    ffi/kernels/transfer/hierarchical/low_latency_combine.cu
    ffi/kernels/transfer/hierarchical/low_latency_dispatch.cu
    ffi/kernels/transfer/hierarchical/low_latency_redispatch.cu
    ffi/kernels/transfer/hierarchical/redispatch.cu
    ffi/kernels/transfer/low_latency/combine.cu
    ffi/kernels/transfer/low_latency/dispatch.cu
    ffi/kernels/transfer/low_latency/redispatch.cu
    ffi/kernels/transfer/preparation.cc
    ffi/kernels/transfer/redispatch.cc
    ffi/kernels/transfer/redispatch.cu
    ffi/kernels/transfer/start_generation.cu
    ffi/kernels/transfer/token_preparation.cc
    ffi/runtime/calls/in_flight_cuda.cc
    ffi/runtime/cuda/device_cuda.cc
    ffi/runtime/cuda/driver_cuda.cc
    ffi/runtime/groups/call_site_cuda.cc
    ffi/runtime/groups/generation_cuda.cc
    ffi/runtime/groups/generation_memory_cuda.cc
    ffi/runtime/groups/group_cuda.cc
    ffi/runtime/groups/group_peers_cuda.cc
    ffi/runtime/groups/groups_cuda.cc
    ffi/runtime/groups/share_generation_cuda.cc
    ffi/runtime/network/ucx/use_ucx_cuda.cc
    ffi/runtime/profile/profile_cuda.cc
    ffi/runtime/transport/local/driver_memory_cuda.cc
    ffi/runtime/transport/local/ipc_memory_cuda.cc
    ffi/runtime/transport/local/nccl_exchange_cuda.cc
    ffi/runtime/transport/local/transport_cuda.cc)
  target_include_directories(jax_ep_cuda SYSTEM PRIVATE
                             "${xla_headers}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(jax_ep_cuda PUBLIC jax_ep_runtime)
  target_compile_definitions(jax_ep_cuda
                             PRIVATE JAX_EP_CUDA_ARCHITECTURES="${JAX_EP_CUDA_ARCHITECTURES}")
  if(JAX_EP_PROFILE)
    target_compile_definitions(jax_ep_cuda PRIVATE JAX_EP_PROFILE)
  endif()
  include(cmake/Nvshmem.cmake)
  target_link_libraries(_ffi PRIVATE jax_ep_cuda)
  target_compile_definitions(_ffi PRIVATE JAX_EP_CUDA_VERSION="${JAX_EP_CUDA_VERSION}"
                                          JAX_EP_CUDA_ARCHITECTURES="${JAX_EP_CUDA_ARCHITECTURES}")
else()
  target_sources(_ffi PRIVATE ffi/without_cuda.cc)
endif()

install(TARGETS _ffi LIBRARY DESTINATION jax_ep)
