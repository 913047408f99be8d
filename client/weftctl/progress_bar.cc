#include "client/weftctl/progress_bar.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace weft::weftctl {

std::string FormatProgress(const TrainProgress& progress, int bar_width) {
  std::string line;
  if (bar_width > 0 && progress.num_steps > 0) {
    const auto filled =
        static_cast<size_t>(progress.step * bar_width / progress.num_steps);
    const auto width = static_cast<size_t>(bar_width);
    line = absl::StrCat("[", std::string(filled, '#'),
                        std::string(width - filled, '.'), "] ");
  }
  absl::StrAppendFormat(&line, "%d/%d loss %.4f grad %.3g %.0f tok/s",
                        progress.step, progress.num_steps,
                        progress.loss_per_token, progress.grad_norm,
                        progress.tokens_per_second);
  return line;
}

void ProgressBar::Show(const TrainProgress& progress) {
  if (is_terminal_) {
    // \x1b[K clears what is left of a longer line.
    out_ << "\r" << FormatProgress(progress, 30) << "\x1b[K" << std::flush;
    open_ = true;
  } else {
    out_ << FormatProgress(progress, 0) << "\n";
  }
}

void ProgressBar::Finish() {
  if (open_) out_ << "\n";
  open_ = false;
}

}  // namespace weft::weftctl
