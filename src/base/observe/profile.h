// Records what one thread does and when, as spans of a Chrome trace.
//
//   profile::Recording recording(100000);
//   {
//     const profile::Use use(&recording);
//     const profile::Span span("layer forward", "layer", 3);
//   }
//   std::string json = profile::ToChromeTrace(recording, "weft-engine");
//
// On a thread without a recording, a Span costs one load of a thread-local
// pointer. Times are host times. On CUDA a span ends when its kernels are
// queued. The wait for the kernels is part of the later span that reads their
// result.
#ifndef WEFT_SRC_BASE_OBSERVE_PROFILE_H_
#define WEFT_SRC_BASE_OBSERVE_PROFILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::profile {

struct SpanTimes {
  // `name` and `value_name` point to string literals.
  const char* name = "";
  const char* value_name = nullptr;  // Null: the span has no value.
  int64_t value = 0;
  // Nanoseconds from the start of the recording.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// Threads: one at a time.
class Recording {
 public:
  explicit Recording(size_t max_spans);

  // Returns the spans in the order in which they ended.
  const std::vector<SpanTimes>& spans() const { return spans_; }
  // Returns how many spans were dropped because max_spans were stored already.
  size_t num_dropped() const { return num_dropped_; }

 private:
  friend class Span;
  int64_t Now() const;
  void Add(const SpanTimes& span);

  const size_t max_spans_;
  const int64_t start_ns_;
  std::vector<SpanTimes> spans_;
  size_t num_dropped_ = 0;
};

// The recording of this thread, or null if it has none.
extern constinit thread_local Recording* active;

// Sends this thread's spans to `recording` while the Use exists.
class Use {
 public:
  explicit Use(Recording* recording) { active = recording; }
  ~Use() { active = nullptr; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

// A span from the construction to the destruction of this object. The spans of
// a thread nest. REQUIRES: the recording outlives the span.
class Span {
 public:
  explicit Span(const char* name, const char* value_name = nullptr,
                int64_t value = 0)
      : recording_(active) {
    if (recording_ != nullptr) [[unlikely]]
      Begin(name, value_name, value);
  }
  ~Span() {
    if (recording_ != nullptr) [[unlikely]]
      End();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void Begin(const char* name, const char* value_name, int64_t value);
  void End();

  Recording* const recording_;
  SpanTimes record_;
};

// Returns the recording as JSON for chrome://tracing and Perfetto.
std::string ToChromeTrace(const Recording& recording,
                          std::string_view thread_name);

}  // namespace weft::profile

#endif  // WEFT_SRC_BASE_OBSERVE_PROFILE_H_
