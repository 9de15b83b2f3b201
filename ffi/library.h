// A shared library opened at run time and never linked, so that the module loads on a machine without it.
#pragma once

#include <string>
#include <vector>

namespace cudnn_jax {

// Paths to try for `library` ("cudnn", "cuda", "cudart", "nvrtc", "cute_dsl_runtime"), replacing earlier
// ones. Thread safe. A library that is already open stays as it is.
void set_library_candidates(const std::string& library, std::vector<std::string> paths);
std::vector<std::string> library_candidates(const std::string& library);

class DynamicLibrary {
 public:
  // Tries, in order: a copy that this process has loaded already (by soname, so that JAX's own copy is
  // shared), the candidates of `library`, then the bare sonames by the loader's search path. Throws
  // LibraryNotFound naming all that was tried. The library is never closed.
  static DynamicLibrary open(const std::string& library, const std::vector<std::string>& sonames);

  void* handle() const { return handle_; }
  const std::string& path() const { return path_; }  // as opened

  // Null when absent.
  void* find(const char* symbol) const;
  // Throws LibraryNotFound naming the symbol and the file.
  void* require(const char* symbol) const;
  template <typename F>
  F require_as(const char* symbol) const {
    return reinterpret_cast<F>(require(symbol));
  }
  // require_as the function pointer that `slot` is.
  template <typename F>
  void bind(F& slot, const char* symbol) const {
    slot = require_as<F>(symbol);
  }

 private:
  DynamicLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  void* handle_;
  std::string path_;
};

}  // namespace cudnn_jax
