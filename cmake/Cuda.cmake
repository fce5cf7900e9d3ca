# Finds nvcc the way build_tools/version.py does and enables CUDA, or says that there is none.
# Sets JAX_EP_WITH_CUDA, JAX_EP_CUDA_VERSION ("13.0") and JAX_EP_CUDA_ARCHITECTURES ("sm_80, ...").
set(command "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/build_tools/find_nvcc.py")
if(NOT JAX_EP_CUDA STREQUAL "")
  list(APPEND command --mode "${JAX_EP_CUDA}")
endif()
# Passes on a compiler that the user set, but not one that an earlier run of CMake found and stored.
if(CMAKE_CUDA_COMPILER AND NOT CMAKE_CUDA_COMPILER STREQUAL JAX_EP_FOUND_NVCC)
  list(APPEND command --explicit "${CMAKE_CUDA_COMPILER}")
endif()
execute_process(
  COMMAND ${command}
  OUTPUT_VARIABLE found
  ERROR_VARIABLE problem
  RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "jax_ep: ${problem}")
endif()
# Matched as a whole: a CMake list would drop empty lines.
string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)\n$" matched "${found}")
set(nvcc "${CMAKE_MATCH_1}")
set(JAX_EP_CUDA_VERSION "${CMAKE_MATCH_2}")
set(message "${CMAKE_MATCH_3}")
message(STATUS "jax_ep: ${message}")

if(nvcc)
  set(JAX_EP_WITH_CUDA TRUE)
  set(suffix "+cu")
  string(REGEX REPLACE "\\..*" "" major "${JAX_EP_CUDA_VERSION}")
  string(APPEND suffix "${major}")
else()
  set(JAX_EP_WITH_CUDA FALSE)
  set(suffix "")
endif()

# The version was chosen before CMake ran. A compiler that only CMake knows of would contradict it.
string(REGEX MATCH "\\+.*" named "${JAX_EP_VERSION}")
if(SKBUILD AND NOT named STREQUAL suffix)
  message(
    FATAL_ERROR
      "jax_ep: the version is ${JAX_EP_VERSION}, but CMake finds: ${message}. Choose the "
      "compiler by the environment variables JAX_EP_CUDA and CUDACXX, not by CMake definitions.")
endif()

if(JAX_EP_WITH_CUDA)
  # SASS for Ampere and Hopper; PTX that newer devices compile when they load it.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual")
  endif()
  if(JAX_EP_FOUND_NVCC AND NOT JAX_EP_FOUND_NVCC STREQUAL nvcc)
    message(FATAL_ERROR "jax_ep: ${CMAKE_BINARY_DIR} was made with ${JAX_EP_FOUND_NVCC}, and now "
                        "${nvcc} is found. Delete that folder to change compilers.")
  endif()
  set(JAX_EP_FOUND_NVCC "${nvcc}" CACHE INTERNAL "The nvcc of this build folder")
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  enable_language(CUDA)
  set(names)
  foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(architecture MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
        list(APPEND names "sm_${CMAKE_MATCH_1}")
      endif()
      if(NOT CMAKE_MATCH_2 STREQUAL "-real")
        list(APPEND names "compute_${CMAKE_MATCH_1}")
      endif()
    endif()
  endforeach()
  list(JOIN names ", " JAX_EP_CUDA_ARCHITECTURES)
endif()
