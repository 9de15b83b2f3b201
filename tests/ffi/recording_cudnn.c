/* A libcudnn that does nothing and writes down what it was asked, in the journal of recording_driver.c. For
   cudnn_step_test.cc.

   A descriptor keeps what was set on it. Executing reads every pointer of the variant pack as a number of
   four bytes, so a pointer to nowhere is caught, and marks the handle busy for a while: a handle in two calls
   at once aborts. */
#include <cudnn.h>
#include <stdlib.h>
#include <time.h>

#include "recording_driver.c"

struct cudnnContext {
  int busy;
  cudaStream_t stream;
};

typedef struct {
  int kind, finalized;
  char text[64];
  int64_t count;
  void* pointers[64];
  int64_t uids[64];
  void* workspace;
  void* handle;
} Descriptor;

static size_t version_now = 91900;

void pretend_version(size_t version) { version_now = version; }

static int descriptors_fail; /* no descriptor can be made */

void fail_descriptors(int fail) { descriptors_fail = fail; }

static int failing; /* the next call about a handle fails */

void fail_next(void) { failing = 1; }
static cudnnStatus_t handle_outcome(void) {
  const int now = failing;
  failing = 0;
  return now ? CUDNN_STATUS_INTERNAL_ERROR : 0;
}

size_t cudnnGetVersion(void) { return version_now; }
const char* cudnnGetErrorString(cudnnStatus_t status) { return status ? "CUDNN_STATUS_OF_THE_TEST" : "fine"; }
void cudnnGetLastErrorString(char* text, size_t size) {
  snprintf(text, size, "the inner reason\nand more\n");
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = calloc(1, sizeof **handle);
  note("create in %lx; ", (unsigned long)current);
  return 0;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  note("destroy in %lx; ", (unsigned long)current);
  if (failing) return handle_outcome();
  return free(handle), 0;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  note("stream %lx; ", (unsigned long)stream);
  handle->stream = stream;
  return handle_outcome();
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  note("ask stream; ");
  *stream = handle->stream;
  return handle_outcome();
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind,
                                           cudnnBackendDescriptor_t* made) {
  if (descriptors_fail) return CUDNN_STATUS_INTERNAL_ERROR;
  Descriptor* descriptor = calloc(1, sizeof *descriptor);
  descriptor->kind = kind;
  *made = descriptor;
  return 0;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return free(descriptor), 0;
}

cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t of) {
  Descriptor* descriptor = of;
  const int kind = descriptor->kind;
  memset(descriptor, 0, sizeof *descriptor);
  descriptor->kind = kind;
  return 0;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  Descriptor* descriptor = of;
  (void)type;
  if (descriptor->finalized) return CUDNN_STATUS_BAD_PARAM;
  switch (name) {
    case CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION:
      snprintf(descriptor->text, sizeof descriptor->text, "%.*s", (int)count, (const char*)values);
      return 0;
    case CUDNN_ATTR_EXECUTION_PLAN_HANDLE: descriptor->handle = *(void* const*)values; return 0;
    case CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS:
      descriptor->count = count;
      memcpy(descriptor->pointers, values, (size_t)count * sizeof(void*));
      return 0;
    case CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS:
      memcpy(descriptor->uids, values, (size_t)count * sizeof(int64_t));
      return 0;
    case CUDNN_ATTR_VARIANT_PACK_WORKSPACE: descriptor->workspace = *(void* const*)values; return 0;
    default: return CUDNN_STATUS_BAD_PARAM;
  }
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t* count,
                                       void* values) {
  (void)of, (void)name, (void)type, (void)room, (void)count, (void)values;
  return CUDNN_STATUS_NOT_SUPPORTED;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t of) {
  Descriptor* descriptor = of;
  descriptor->finalized = 1;
  if (descriptor->kind != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) return 0;
  note("plan; ");
  if (descriptor->handle == NULL) abort();
  if (strstr(descriptor->text, "failed")) return CUDNN_STATUS_INTERNAL_ERROR;
  return strstr(descriptor->text, "broken") ? CUDNN_STATUS_NOT_SUPPORTED : 0;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t of) {
  const Descriptor* pack = of;
  if (__atomic_exchange_n(&handle->busy, 1, __ATOMIC_SEQ_CST)) abort();
  if (quiet) {
    const struct timespec pause = {0, 200000};
    nanosleep(&pause, NULL);
  } else {
    note("execute");
    for (int64_t i = 0; i < pack->count; ++i) {
      note(" %lx:%x", (unsigned long)pack->uids[i], *(uint32_t*)pack->pointers[i]);
    }
    if (pack->workspace) note(" workspace %x", *(uint8_t*)pack->workspace);
    note("; ");
  }
  __atomic_store_n(&handle->busy, 0, __ATOMIC_SEQ_CST);
  return strstr(((const Descriptor*)plan)->text, "failing") ? CUDNN_STATUS_EXECUTION_FAILED : 0;
}
