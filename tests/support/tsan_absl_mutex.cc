// Tells ThreadSanitizer in which order threads lock an absl::Mutex. gRPC's
// reactors use absl::Mutex, and Abseil's library is not instrumented. The
// linker uses the methods below instead of the library's methods. The methods
// below call the library's methods. Only preset tsan uses this file.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdlib>
#include <string>

#include "absl/base/options.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

using Method = void (*)(Mutex*);

#define WEFT_TEXT_OF(name) #name
#define WEFT_TEXT(name) WEFT_TEXT_OF(name)

// Returns the library's own method, by its mangled name.
Method Library(const char* method) {
  const std::string inner = WEFT_TEXT(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string name =
      absl::StrCat("_ZN4absl", inner.size(), inner, "5Mutex", method, "Ev");
  void* const found = dlsym(RTLD_NEXT, name.c_str());
  if (found == nullptr) std::abort();
  return reinterpret_cast<Method>(found);
}

}  // namespace

void Mutex::Lock() {
  static const Method lock = Library("4Lock");
  lock(this);
  __tsan_acquire(this);
}

void Mutex::Unlock() {
  static const Method unlock = Library("6Unlock");
  __tsan_release(this);
  unlock(this);
}

ABSL_NAMESPACE_END
}  // namespace absl
