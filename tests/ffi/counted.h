// Counts what the runtime must not do while a program executes, in builds without a sanitizer: memory that is
// allocated and locks that are taken, by this thread. Included by one file of a program.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <cstddef>

namespace cudnn_jax {

struct Counted {
  long allocations = 0;
  long locks = 0;
};

inline thread_local Counted counted;

}  // namespace cudnn_jax

#ifdef COUNT_CALLS
extern "C" {

void* __libc_malloc(size_t bytes);

void* malloc(size_t bytes) {
  ++cudnn_jax::counted.allocations;
  return __libc_malloc(bytes);
}

int pthread_mutex_lock(pthread_mutex_t* mutex) {
  static const auto real =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  ++cudnn_jax::counted.locks;
  return real(mutex);
}
}
#endif
