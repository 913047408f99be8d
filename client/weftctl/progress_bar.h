// Shows the progress of training: a bar on a terminal, otherwise one line per
// step.
#ifndef WEFT_CLIENT_WEFTCTL_PROGRESS_BAR_H_
#define WEFT_CLIENT_WEFTCTL_PROGRESS_BAR_H_

#include <cstdint>
#include <ostream>
#include <string>

namespace weft::weftctl {

struct TrainProgress {
  int64_t step = 0;
  int64_t num_steps = 0;
  double loss_per_token = 0;
  double tokens_per_second = 0;
  double grad_norm = 0;
};

// Returns text such as "[#####.....] 5/10 loss 1.2345 grad 0.1 3200 tok/s". If
// bar_width is 0, the text has no bar.
[[nodiscard]] std::string FormatProgress(const TrainProgress& progress,
                                         int bar_width);

// Threads: not thread-safe.
class ProgressBar {
 public:
  ProgressBar(std::ostream& out, bool is_terminal)
      : out_(out), is_terminal_(is_terminal) {}
  void Show(const TrainProgress& progress);
  // Ends the line of the bar, if there is one.
  void Finish();

 private:
  std::ostream& out_;
  const bool is_terminal_;
  bool open_ = false;
};

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_PROGRESS_BAR_H_
