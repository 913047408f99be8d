#include "src/base/observe/profile.h"

#include "absl/strings/str_format.h"
#include "src/base/clock.h"

namespace weft::profile {

constinit thread_local Recording* active = nullptr;

Recording::Recording(size_t max_spans)
    : max_spans_(max_spans), start_ns_(absl::ToUnixNanos(SteadyNow())) {}

int64_t Recording::Now() const {
  return absl::ToUnixNanos(SteadyNow()) - start_ns_;
}

void Recording::Add(const SpanTimes& span) {
  if (spans_.size() < max_spans_) {
    spans_.push_back(span);
  } else {
    ++num_dropped_;
  }
}

void Span::Begin(const char* name, const char* value_name, int64_t value) {
  record_ = {.name = name,
             .value_name = value_name,
             .value = value,
             .begin_ns = recording_->Now()};
}

void Span::End() {
  record_.end_ns = recording_->Now();
  recording_->Add(record_);
}

std::string ToChromeTrace(const Recording& recording,
                          std::string_view thread_name) {
  constexpr double kNanosPerMicro = 1000;
  std::string json = absl::StrFormat(
      R"({"displayTimeUnit":"ms","otherData":{"dropped_spans":%d},)"
      R"("traceEvents":[{"ph":"M","pid":1,"tid":1,"name":"thread_name",)"
      R"("args":{"name":"%s"}})",
      recording.num_dropped(), std::string(thread_name));
  for (const SpanTimes& span : recording.spans()) {
    absl::StrAppendFormat(
        &json, R"(,%s{"ph":"X","pid":1,"tid":1,"name":"%s","ts":%.3f,)", "\n",
        span.name, static_cast<double>(span.begin_ns) / kNanosPerMicro);
    absl::StrAppendFormat(
        &json, R"("dur":%.3f)",
        static_cast<double>(span.end_ns - span.begin_ns) / kNanosPerMicro);
    if (span.value_name != nullptr) {
      absl::StrAppendFormat(&json, R"(,"args":{"%s":%d})", span.value_name,
                            span.value);
    }
    json += "}";
  }
  json += "]}\n";
  return json;
}

}  // namespace weft::profile
