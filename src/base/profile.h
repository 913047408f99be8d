// Spans of one thread: what it does, from when to when, as a Chrome trace.
//
//   profile::Recording recording(100000);
//   {
//     const profile::Use use(&recording);
//     const profile::Span span("layer forward", "layer", 3);
//   }
//   std::string json = profile::ToChromeTrace(recording, "weft-engine");
//
// Spans of a thread without a recording cost one load of a thread-local
// pointer. Times are those of the host: on CUDA a span ends when its kernels
// are queued, and the thread waits for them in the span that reads a result.
#ifndef WEFT_SRC_BASE_PROFILE_H_
#define WEFT_SRC_BASE_PROFILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::profile {

struct SpanRecord {
  // Literals of the program.
  const char* name = "";
  const char* value_name = nullptr;  // Null: the span has no value.
  int64_t value = 0;
  // Since the recording began.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

// Threads: one at a time.
class Recording {
 public:
  explicit Recording(size_t max_spans);

  // Spans in the order in which they ended.
  [[nodiscard]] const std::vector<SpanRecord>& spans() const { return spans_; }
  // Returns the number of spans that found no room.
  [[nodiscard]] size_t num_dropped() const { return num_dropped_; }

 private:
  friend class Span;
  [[nodiscard]] int64_t Now() const;
  void Add(const SpanRecord& span);

  const size_t max_spans_;
  const int64_t start_ns_;
  std::vector<SpanRecord> spans_;
  size_t num_dropped_ = 0;
};

// The recording of this thread; null: none.
extern constinit thread_local Recording* active;

// Records this thread's spans until it is destroyed.
class Use {
 public:
  explicit Use(Recording* recording) { active = recording; }
  ~Use() { active = nullptr; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

// Lasts from its construction to its destruction. Spans of a thread nest.
// REQUIRES: the recording outlives the span.
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
  SpanRecord record_;
};

// Returns the JSON that chrome://tracing and Perfetto open.
[[nodiscard]] std::string ToChromeTrace(const Recording& recording,
                                        std::string_view thread_name);

}  // namespace weft::profile

#endif  // WEFT_SRC_BASE_PROFILE_H_
