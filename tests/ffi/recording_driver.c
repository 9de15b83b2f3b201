/* A libcuda with two devices and no GPU, which writes down what it was asked. For core_test.cc.

   Contexts: 0xd0 and 0xd1 are the primary contexts of devices 0 and 1. A stream names the context that stands
   at its address. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static char journal[4096];
static __thread void* current;

static void note(const char* format, unsigned long a, unsigned long b, unsigned long c) {
  char line[128];
  snprintf(line, sizeof line, format, a, b, c);
  strncat(journal, line, sizeof journal - strlen(journal) - 1);
}

/* What happened since the last call. */
const char* take_journal(void) {
  static char taken[4096];
  strcpy(taken, journal);
  journal[0] = 0;
  return taken;
}

int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorString(int status, const char** text) {
  return *text = status == 101 ? "invalid device" : "failure", 0;
}
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute == 75) return *value = 9 - device, 0; /* device 0 is sm_90, device 1 is sm_80 */
  if (attribute == 76) return *value = 0, 0;
  return 1;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(0xd0ul + (unsigned long)device);
  note("retain %lx; ", (unsigned long)*context, 0, 0);
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) {
  current = context;
  note("bind %lx; ", (unsigned long)context, 0, 0);
  return 0;
}
int cuStreamGetCtx(void* stream, void** context) { return *context = *(void**)stream, 0; }
int cuMemsetD8Async(uint64_t dest, unsigned char byte, size_t bytes, void* stream) {
  memset((void*)dest, byte, bytes); /* under a sanitizer this checks the range too */
  note("fill %lx with %lx in %lx; ", bytes, byte, (unsigned long)current);
  return stream == (void*)1 ? 700 : 0;
}
int cuMemsetD32Async(uint64_t dest, unsigned int word, size_t words, void* stream) {
  for (size_t i = 0; i < words; ++i) ((unsigned int*)dest)[i] = word;
  note("fill %lx words with %lx in %lx; ", words, word, (unsigned long)current);
  return stream == (void*)1 ? 700 : 0;
}
