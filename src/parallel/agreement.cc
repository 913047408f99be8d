#include "src/parallel/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace weft::parallel {
namespace {

constexpr int64_t kMessageBytes = 1024;

}  // namespace

absl::Status Agree(Communicator& group, const absl::Status& own) {
  // The note is one byte with the code of `own`, then the message of `own`,
  // padded with zeros.
  at::Tensor note = at::zeros({1 + kMessageBytes}, at::kByte);
  auto* const bytes = note.mutable_data_ptr<uint8_t>();
  bytes[0] = static_cast<uint8_t>(own.raw_code());
  const std::string text(own.message());
  std::copy_n(text.begin(), std::min<int64_t>(kMessageBytes, std::ssize(text)),
              bytes + 1);
  const at::Tensor notes = group.AllGather(note);
  for (int rank = 0; rank < group.shard().size; ++rank) {
    const auto* const other =
        notes.const_data_ptr<uint8_t>() + rank * note.numel();
    if (other[0] == 0) continue;
    const auto* const end = std::find(other + 1, other + note.numel(), 0);
    return {static_cast<absl::StatusCode>(other[0]),
            absl::StrCat("rank ", rank, ": ", std::string(other + 1, end))};
  }
  return absl::OkStatus();
}

int64_t Smallest(Communicator& group, int64_t own) {
  return group.AllGather(at::tensor({own})).min().item<int64_t>();
}

}  // namespace weft::parallel
