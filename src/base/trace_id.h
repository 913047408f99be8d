// The id that names a request in all log lines about it.
//
// A thread that works for a request holds a TraceScope; Log then adds the field
// `trace_id`. The id follows the request from thread to thread: Worker::Post
// and the dispatcher keep the scope of the caller with what they queue.
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

// Null: no request.
using TraceId = std::shared_ptr<const std::string>;

// Returns the trace id of `traceparent`, the header of W3C Trace Context. If it
// is not valid, returns `request_id`. If that is not 1 to kMaxTraceIdBytes
// letters, digits, '-', '_' or '.', returns 32 random hexadecimal digits.
[[nodiscard]] TraceId MakeTraceId(std::string_view traceparent,
                                  std::string_view request_id);

// Returns the id of the present scope of this thread; null outside of one.
[[nodiscard]] TraceId CurrentTrace();

// Returns one id for the work of several requests: the different ids with
// commas, at most 16 of them, then the number of further requests.
[[nodiscard]] TraceId JoinTraces(const std::vector<TraceId>& ids);

// Sets the id of this thread until the scope ends. Scopes nest.
class TraceScope {
 public:
  explicit TraceScope(TraceId id);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  TraceId outer_;
};

// Returns `task` so that it runs with the id that this thread has now. Outside
// of a scope it returns `task` itself.
template <typename... Args>
[[nodiscard]] std::function<void(Args...)> KeepTrace(
    std::function<void(Args...)> task) {
  TraceId id = CurrentTrace();
  if (id == nullptr) return task;
  return [id = std::move(id), task = std::move(task)](Args... args) {
    const TraceScope scope(id);
    task(args...);
  };
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_TRACE_ID_H_
