// A built cuDNN plan as plain values: cuDNN's own serialised form and everything around it that an execution
// hands over. It is what a "cudnn" step carries, and all that running a plan needs: no graph, no
// cudnn_frontend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_jax {

// One execution gives cuDNN a pointer per uid. A slot is a position in that list.
struct CudnnPlan {
  struct Scalar {  // passed by value: the pointer is to host memory
    size_t slot;
    std::vector<uint8_t> bytes;
  };
  struct Scratch {  // a part of the workspace
    size_t slot;
    int64_t offset;
  };
  struct Alias {  // another slot's pointer, moved by `offset` bytes
    size_t slot;
    size_t source;
    int64_t offset;
  };
  struct Clear {  // zeroed before each execution
    int64_t offset;
    int64_t bytes;
  };
  struct Upload {  // copied from the host before each execution
    int64_t offset;
    std::vector<uint8_t> bytes;
  };

  int64_t cudnn_version = 0;
  std::string backend;               // cuDNN's serialised execution plan
  int64_t workspace = 0;             // bytes, all of it
  int64_t backend_workspace = 0;     // where cuDNN's own part of the workspace starts
  std::vector<int64_t> uids;         // by slot
  std::vector<size_t> caller_slots;  // filled with the caller's buffers, by rising uid
  std::vector<Scalar> scalars;
  std::vector<Scratch> scratch;
  std::vector<Alias> aliases;
  std::vector<Clear> clears;
  std::vector<Upload> uploads;

  std::vector<int64_t> caller_uids() const;
};

// The same plan always gives the same bytes.
std::vector<uint8_t> to_bytes(const CudnnPlan& plan);
// Checks every index and offset. Throws Error (kInvalidArgument) naming `field` and what is inside it.
CudnnPlan plan_from_bytes(const uint8_t* data, size_t size, const std::string& field);

}  // namespace cudnn_jax
