/* A CUDA driver without a device, enough for cuDNN to plan with: cuDNN compiles kernels and loads them, and
   asks nothing else that has to succeed. Every function that is not written out answers "no device".
   With STUB_LIBCUDA_TRACE set, the functions that are asked for go to standard error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { kSuccess = 0, kNoDevice = 100 };
enum { kCudaVersion = 13000 };

static int dummy; /* what every handle points at */

static int no_device(void) { return kNoDevice; }

int cuInit(unsigned flags) {
  (void)flags;
  return kNoDevice;
}

int cuDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  *count = 0;
  return kNoDevice;
}

int cuGetErrorString(int status, const char** text) {
  *text = status == kNoDevice ? "no CUDA-capable device is detected" : "unknown error";
  return kSuccess;
}

int cuGetErrorName(int status, const char** text) {
  *text = status == kNoDevice ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return kSuccess;
}

/* What cuDNN, or our own driver, looks up by name and nobody here can serve */

#define ABSENT(name) \
  int name(void) { return kNoDevice; }
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetDevice)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuCtxSetCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuKernelGetAttribute)
ABSENT(cuKernelSetAttribute)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
ABSENT(cuMemcpyHtoDAsync_v2)
ABSENT(cuMemsetD8Async)
ABSENT(cuMemsetD32Async)
ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuStreamGetCtx)
ABSENT(cuThreadExchangeStreamCaptureMode)

/* Kernels */

static int load(void** handle) {
  *handle = &dummy;
  return kSuccess;
}

int cuModuleLoad(void** module) { return load(module); }
int cuModuleLoadData(void** module) { return load(module); }
int cuModuleLoadDataEx(void** module) { return load(module); }
int cuModuleLoadFatBinary(void** module) { return load(module); }
int cuModuleGetFunction(void** function) { return load(function); }
int cuModuleUnload(void* module) {
  (void)module;
  return kSuccess;
}
int cuLibraryLoadData(void** library) { return load(library); }
int cuLibraryLoadFromFile(void** library) { return load(library); }
int cuLibraryGetKernel(void** kernel) { return load(kernel); }
int cuLibraryGetModule(void** module) { return load(module); }
int cuLibraryUnload(void* library) {
  (void)library;
  return kSuccess;
}
int cuKernelGetFunction(void** function) { return load(function); }

/* How CUDA's runtime, linked into cuDNN, finds functions */

static int find(const char* symbol, void** function) {
  Dl_info here;
  dladdr((void*)&dummy, &here);
  void* self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  void* found = self ? dlsym(self, symbol) : NULL;
  if (getenv("STUB_LIBCUDA_TRACE")) fprintf(stderr, "libcuda: %s%s\n", symbol, found ? " (here)" : "");
  *function = found ? found : (void*)&no_device;
  return kSuccess;
}

int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  (void)version;
  (void)flags;
  return find(symbol, function);
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  if (status) *status = 0;
  return cuGetProcAddress(symbol, function, version, flags);
}

int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return kNoDevice;
}
