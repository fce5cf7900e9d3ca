// Opens the libraries of networks, and finds functions in them.
#ifndef JAX_EP_RUNTIME_NETWORK_LIBRARY_H_
#define JAX_EP_RUNTIME_NETWORK_LIBRARY_H_

#include <dlfcn.h>

#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Returns a library that is open already, else that of the folder, or the system's if it is empty.
// Libraries find their modules and transports in their own folder. Null if there is none: dlerror.
inline void* OpenLibrary(const char* name, const std::string& folder) {
  if (void* const opened = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return opened;
  const std::string path = folder.empty() ? name : Concatenate(folder, "/", name);
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

// Sets a pointer to a function. Returns false, and sets null, if the library has none of this name.
template <typename Function>
bool FindFunction(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  return *function != nullptr;
}

// Returns the path of the library that a function is in, or else its name.
template <typename Function>
std::string PathOfLibrary(Function* function, const char* name) {
  Dl_info info;
  return dladdr(reinterpret_cast<const void*>(function), &info) != 0 ? info.dli_fname : name;
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_LIBRARY_H_
