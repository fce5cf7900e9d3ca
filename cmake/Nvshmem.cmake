# The kernels that put by themselves over NVSHMEM: compiled apart, linked with its device functions, and
# carried as data (ffi/kernels/nvshmem/cubin.cc). Without the Python package nvidia-nvshmem, whose
# headers and device functions are needed, the build leaves them out. The host's library is opened at
# run time.
execute_process(
  COMMAND
    "${Python_EXECUTABLE}" -c
    "import nvidia, os; print(next(p for p in (os.path.join(d, 'nvshmem') for d in nvidia.__path__) if os.path.exists(os.path.join(p, 'include', 'nvshmem.h'))))"
  OUTPUT_VARIABLE JAX_EP_NVSHMEM
  RESULT_VARIABLE failed
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(failed)
  message(STATUS "jax_ep: without NVSHMEM, which pip install nvidia-nvshmem-cu13==3.4.5 would add")
  return()
endif()
message(STATUS "jax_ep: NVSHMEM of ${JAX_EP_NVSHMEM}")

cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH nvcc_folder)
find_program(JAX_EP_NVLINK nvlink HINTS "${nvcc_folder}" "${CUDAToolkit_BIN_DIR}" REQUIRED)

set(folder "${CMAKE_CURRENT_BINARY_DIR}/nvshmem")
file(MAKE_DIRECTORY "${folder}")
set(kernels ffi/kernels/nvshmem/puts.cu ffi/kernels/transfer/start_generation.cu)
foreach(name combine dispatch redispatch low_latency_combine low_latency_dispatch low_latency_redispatch)
  list(APPEND kernels "ffi/kernels/transfer/hierarchical/${name}.cu")
endforeach()
set(cubins)
foreach(kernel IN LISTS kernels)
  cmake_path(GET kernel STEM stem)
  set(cubin "${folder}/${stem}.cubin")
  # A function of NVSHMEM may have no more registers than the kernels that call it: combine has 72.
  add_custom_command(
    OUTPUT "${cubin}"
    COMMAND
      ${CMAKE_CUDA_COMPILER_LAUNCHER} "${CMAKE_CUDA_COMPILER}" -std=c++20 -O3 -rdc=true -cubin
      $<$<STREQUAL:${stem},puts>:-maxrregcount=72>
      -gencode=arch=compute_90a,code=sm_90a -DJAX_EP_NVSHMEM "-I${CMAKE_CURRENT_SOURCE_DIR}" -isystem
      "${JAX_EP_NVSHMEM}/include" -MD -MF "${cubin}.d" "${CMAKE_CURRENT_SOURCE_DIR}/${kernel}" -o
      "${cubin}"
    DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${kernel}"
    DEPFILE "${cubin}.d"
    COMMENT "Compiling ${kernel} for NVSHMEM"
    COMMAND_EXPAND_LISTS VERBATIM)
  list(APPEND cubins "${cubin}")
endforeach()
set(linked "${folder}/jax_ep_nvshmem.cubin")
add_custom_command(
  OUTPUT "${linked}"
  COMMAND "${JAX_EP_NVLINK}" -arch=sm_90a ${cubins} "-L${JAX_EP_NVSHMEM}/lib" -lnvshmem_device -o
          "${linked}"
  DEPENDS ${cubins}
  COMMENT "Linking the kernels for NVSHMEM"
  VERBATIM)
add_custom_target(jax_ep_nvshmem_cubin DEPENDS "${linked}")
add_dependencies(jax_ep_cuda jax_ep_nvshmem_cubin)
set_source_files_properties(
  ffi/kernels/nvshmem/cubin.cc PROPERTIES COMPILE_DEFINITIONS "JAX_EP_NVSHMEM_CUBIN=\"${linked}\""
                                          OBJECT_DEPENDS "${linked}")
