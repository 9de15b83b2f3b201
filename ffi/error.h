// Errors of the runtime. Every one is a single line a user can act on; the XLA handlers and the Python
// bindings translate them at their edge, so nothing below those two knows about either.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace cudnn_jax {

enum class ErrorKind {
  kInvalidArgument,     // what was passed does not fit the rule
  kNotFound,            // a library or a symbol is not on this machine
  kFailedPrecondition,  // the program is sound but not for this machine
  kUnimplemented,       // this build has no such step
  kInternal,            // the driver or a library reported a failure
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// A call into the driver or a library failed. Names the call and the failure; the program adds the step.
class CallError : public Error {
 public:
  explicit CallError(const std::string& message) : Error(ErrorKind::kInternal, message) {}
};

// Names the library and every place that was tried.
class LibraryNotFound : public Error {
 public:
  explicit LibraryNotFound(const std::string& message) : Error(ErrorKind::kNotFound, message) {}
};

}  // namespace cudnn_jax
