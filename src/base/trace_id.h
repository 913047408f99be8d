// The id that names a request in all log lines about it.
//
// A thread that works for a request holds a TraceScope. Log then adds the field
// `trace_id`. The id follows the request from thread to thread: Worker::Post
// and the dispatcher store the id of the posting thread with each task.
//
//   const TraceScope scope(MakeTraceId(traceparent, request_id));
//   Log(LogLevel::kInfo, "adapter deleted");  // ... trace_id=4bf92f35...
#ifndef WEFT_SRC_BASE_TRACE_ID_H_
#define WEFT_SRC_BASE_TRACE_ID_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft {

inline constexpr size_t kMaxTraceIdBytes = 64;

// Null means: the work belongs to no request.
using TraceId = std::shared_ptr<const std::string>;

// Returns the trace id of `traceparent`, the header of W3C Trace Context. If
// that header is not valid, returns `request_id`. If `request_id` is not valid
// either, returns 32 random hexadecimal digits. A valid `request_id` has 1 to
// kMaxTraceIdBytes letters, digits, '-', '_' or '.'.
TraceId MakeTraceId(std::string_view traceparent, std::string_view request_id);

// Returns the id of this thread's innermost TraceScope; null outside any scope.
TraceId CurrentTrace();

// Returns one id for work that serves several requests: at most 16 different
// ids with commas between them. If N more ids come after these 16, ",+N" ends
// the result. Skips null ids, and returns null if all are null.
TraceId JoinTraces(const std::vector<TraceId>& ids);

// Sets the id of this thread until the scope is destroyed. Scopes nest.
class TraceScope {
 public:
  explicit TraceScope(TraceId id);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceId outer_;
};

// Returns a function that runs `task` with the id that this thread has now. If
// this thread has no id, returns `task` itself.
template <typename... Args>
std::function<void(Args...)> KeepTrace(std::function<void(Args...)> task) {
  TraceId id = CurrentTrace();
  if (id == nullptr) return task;
  return [id = std::move(id), task = std::move(task)](Args... args) {
    const TraceScope scope(id);
    task(args...);
  };
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_TRACE_ID_H_
