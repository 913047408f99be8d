#include "server/tinker/prompt_top.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace weft::tinker {
namespace {

// The prefixes of one prompt, on their way through the engine.
class Walk : public std::enable_shared_from_this<Walk> {
 public:
  Walk(WaitingSample sample, const SampleFormat& format,
       std::function<void(WaitingSample)> add,
       std::function<void(const absl::StatusOr<SampleResult>&,
                          const std::vector<TopLogprobs>&)>
           finish)
      : sample_(std::move(sample)),
        count_(static_cast<uint32_t>(format.prompt_top)),
        add_(std::move(add)),
        finish_(std::move(finish)),
        rows_(static_cast<size_t>(std::max<int64_t>(
            1, sample_.request.prompt_size() - format.last_n))) {}

  void Begin(const absl::StatusOr<SampleResult>& result) {
    if (!result.ok()) return finish_(result, {});
    result_ = *result;
    Next();
  }

 private:
  // Adds the next prefix, or finishes after the last one.
  void Next() {
    const int length = static_cast<int>(rows_.size());
    if (length == sample_.request.prompt_size()) return finish_(result_, rows_);
    WaitingSample prefix{
        .id = sample_.id,
        .origin = sample_.origin,
        .request = {},
        .done =
            [self = shared_from_this()](
                const absl::StatusOr<SampleResult>& row) { self->Take(row); },
        .reserved = sample_.reserved};
    prefix.request.set_adapter_id(sample_.request.adapter_id());
    prefix.request.set_snapshot(sample_.request.snapshot());
    const auto& prompt = sample_.request.prompt();
    prefix.request.mutable_prompt()->Add(prompt.begin(),
                                         prompt.begin() + length);
    prefix.request.set_top_logprobs(count_);
    prefix.request.mutable_config()->set_max_tokens(1);
    add_(std::move(prefix));
  }

  void Take(const absl::StatusOr<SampleResult>& row) {
    if (!row.ok()) return finish_(row.status(), {});
    rows_.push_back(row->samples.at(0).top_logprobs.at(0));
    Next();
  }

  const WaitingSample sample_;
  const uint32_t count_;
  const std::function<void(WaitingSample)> add_;
  const std::function<void(const absl::StatusOr<SampleResult>&,
                           const std::vector<TopLogprobs>&)>
      finish_;
  SampleResult result_;
  std::vector<TopLogprobs> rows_;
};

}  // namespace

Callback<SampleResult> TopOfPrompt(
    const WaitingSample& sample, const SampleFormat& format,
    std::function<void(WaitingSample)> add,
    std::function<void(const absl::StatusOr<SampleResult>&,
                       const std::vector<TopLogprobs>&)>
        finish) {
  const auto walk =
      std::make_shared<Walk>(sample, format, std::move(add), std::move(finish));
  return [walk](const absl::StatusOr<SampleResult>& result) {
    walk->Begin(result);
  };
}

}  // namespace weft::tinker
