# JAX_EP_VERSION: what the wheel is called, or in a build by hand the version without a suffix.
if(SKBUILD_PROJECT_VERSION_FULL)
  set(JAX_EP_VERSION "${SKBUILD_PROJECT_VERSION_FULL}")
else()
  file(STRINGS build_tools/version.py line REGEX "^VERSION = ")
  string(REGEX REPLACE "^VERSION = \"(.*)\"$" "\\1" JAX_EP_VERSION "${line}")
endif()
