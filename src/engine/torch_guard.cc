#include "src/engine/torch_guard.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "src/base/log.h"
#include "src/base/reason.h"

namespace weft::engine {
namespace {

// The value of cudaErrorMemoryAllocation. A CPU build lacks the CUDA header
// that defines the name.
constexpr int kCudaOutOfMemory = 2;

absl::Status Internal(const char* what, const c10::Error& error) {
  Log(LogLevel::kError, "LibTorch error",
      {{"work", what}, {"error", error.what()}});
  return absl::InternalError(
      absl::StrCat(what, ": ", error.what_without_backtrace()));
}

absl::Status OutOfMemory(const std::string& message) {
  return WithReason(absl::ResourceExhaustedError(message),
                    {.name = "OUT_OF_MEMORY", .values = {}});
}

absl::Status OutOfDeviceMemory(const char* what) {
  Log(LogLevel::kError, "out of device memory", {{"work", what}});
  return OutOfMemory(absl::StrCat(what, ": out of device memory"));
}

}  // namespace

absl::Status RunGuarded(const char* what, const std::function<void()>& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const c10::OutOfMemoryError&) {
    return OutOfDeviceMemory(what);
  } catch (const c10::AcceleratorError& error) {
    // CUDA itself may also run out of memory, because pinned memory and CUDA's
    // libraries do not use LibTorch's allocator of device memory.
    return error.get_error_code() == kCudaOutOfMemory ? OutOfDeviceMemory(what)
                                                      : Internal(what, error);
  } catch (const std::bad_alloc&) {
    Log(LogLevel::kError, "out of memory", {{"work", what}});
    return OutOfMemory(absl::StrCat(what, ": out of memory"));
  } catch (const c10::NotImplementedError& error) {
    Log(LogLevel::kError, "not implemented",
        {{"work", what}, {"error", error.what_without_backtrace()}});
    return absl::UnimplementedError(
        absl::StrCat(what, ": ", error.what_without_backtrace()));
  } catch (const c10::Error& error) {
    return Internal(what, error);
  } catch (const std::exception& error) {
    Log(LogLevel::kError, "exception",
        {{"work", what}, {"error", error.what()}});
    return absl::InternalError(absl::StrCat(what, ": ", error.what()));
  }
}

}  // namespace weft::engine
