#include "ffi/library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#include "ffi/error.h"

namespace cudnn_jax {
namespace {

struct Candidates {
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> paths;
};

Candidates& candidates() {
  static Candidates& instance = *new Candidates;
  return instance;
}

// What brings a library, for the message that it is missing.
std::string where_from(const std::string& library) {
  static const std::map<std::string, std::string> kSources = {
      {"cuda", "install the NVIDIA driver"},
      {"cudnn", "pip install cudnn_jax[cuda13]"},
      {"cute_dsl_runtime", "pip install cudnn_jax[cutedsl]"},
  };
  const auto found = kSources.find(library);
  return found == kSources.end() ? "" : "; to get it: " + found->second;
}

// Why the last dlopen or dlsym of this thread failed. A newline would break the one-line rule.
std::string reason() {
  const char* text = dlerror();
  std::string line = text == nullptr ? "no reason given" : text;
  for (char& c : line) c = c == '\n' ? ' ' : c;
  return line;
}

}  // namespace

void set_library_candidates(const std::string& library, std::vector<std::string> paths) {
  std::lock_guard<std::mutex> lock(candidates().mutex);
  candidates().paths[library] = std::move(paths);
}

std::vector<std::string> library_candidates(const std::string& library) {
  std::lock_guard<std::mutex> lock(candidates().mutex);
  return candidates().paths[library];
}

DynamicLibrary DynamicLibrary::open(const std::string& library, const std::vector<std::string>& sonames) {
  for (const std::string& soname : sonames) {
    if (void* handle = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD)) return {handle, soname};
  }
  std::string tried;
  std::vector<std::string> names = library_candidates(library);
  names.insert(names.end(), sonames.begin(), sonames.end());
  for (const std::string& name : names) {
    dlerror();
    if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, name};
    tried += (tried.empty() ? "" : "; ") + name + " (" + reason() + ")";
  }
  throw LibraryNotFound("lib" + library + " could not be opened, tried: " + tried + where_from(library));
}

void* DynamicLibrary::find(const char* symbol) const { return dlsym(handle_, symbol); }

void* DynamicLibrary::require(const char* symbol) const {
  dlerror();
  if (void* found = dlsym(handle_, symbol)) return found;
  throw LibraryNotFound(path_ + " lacks " + symbol + ": " + reason());
}

}  // namespace cudnn_jax
