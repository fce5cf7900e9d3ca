# JAX_EP_UCX: the folder of the Python package libucx, whose headers the build needs. The library itself
# is opened at run time.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import libucx, os; print(os.path.dirname(libucx.__file__))"
  OUTPUT_VARIABLE JAX_EP_UCX
  ERROR_VARIABLE problem
  RESULT_VARIABLE failed
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed OR NOT EXISTS "${JAX_EP_UCX}/include/ucp/api/ucp.h")
  message(FATAL_ERROR "jax_ep: the headers of UCX are not in ${Python_EXECUTABLE}: "
                      "pip install libucx-cu13\n${problem}")
endif()
