#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/cuda/logit_edits.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/sampling/draw_rows_cuda.h"

namespace weft::sampling::cuda {
namespace {

namespace k = kernels::cuda;

// A list is uploaded as it is.
static_assert(sizeof(k::TokenEdit) == sizeof(LogitEdit) &&
              offsetof(k::TokenEdit, bias) == offsetof(LogitEdit, bias) &&
              offsetof(k::TokenEdit, repetition) ==
                  offsetof(LogitEdit, repetition) &&
              offsetof(k::TokenEdit, penalty) == offsetof(LogitEdit, penalty));
// So updates that follow rows are aligned as they must be.
static_assert(sizeof(k::EditedRow) % alignof(k::EditUpdate) == 0);

k::TokenEdit KernelEdit(const LogitEdit& edit) {
  return {.token = edit.token,
          .bias = edit.bias,
          .repetition = edit.repetition,
          .penalty = edit.penalty};
}

// Returns the row in the kernel's format. Appends its updates to `updates`.
k::EditedRow RowOf(const RowEdits& row, at::Device device,
                   std::vector<k::EditUpdate>& updates) {
  const SharedEdits& shared = row.edits->shared();
  const std::vector<LogitEdit>& own = row.edits->own();
  const SequenceEdits::DeviceList list = row.edits->UpdateOn(device);
  k::EditedRow edited = {
      .row = row.row,
      .num_shared = static_cast<int32_t>(shared.edits().size()),
      .num_own = static_cast<int32_t>(own.size()),
      .first_update = static_cast<int32_t>(updates.size()),
      .num_updates = static_cast<int32_t>(list.stale_places.size())};
  for (const int32_t place : list.stale_places) {
    updates.push_back({.place = place, .edit = KernelEdit(own[place])});
  }
  if (shared.edits_on_device().defined()) {
    edited.shared = static_cast<const k::TokenEdit*>(
        shared.edits_on_device().const_data_ptr());
  }
  if (list.bytes.defined()) {
    edited.own = static_cast<k::TokenEdit*>(list.bytes.mutable_data_ptr());
  }
  const at::Tensor& banned = shared.banned(row.early);
  if (banned.defined()) {
    edited.banned = static_cast<const uint32_t*>(banned.const_data_ptr());
  }
  return edited;
}

}  // namespace

void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows) {
  std::vector<k::EditedRow> edited;
  std::vector<k::EditUpdate> updates;
  for (const RowEdits& row : rows) {
    edited.push_back(RowOf(row, logits_RV.device(), updates));
  }
  // One copy has the rows and then the updates.
  const size_t row_bytes = edited.size() * sizeof(k::EditedRow);
  std::vector<std::byte> table(row_bytes +
                               updates.size() * sizeof(k::EditUpdate));
  std::memcpy(table.data(), edited.data(), row_bytes);
  if (!updates.empty()) {
    std::memcpy(table.data() + row_bytes, updates.data(),
                table.size() - row_bytes);
  }
  const at::Tensor on_device =
      ops::ToDevice(std::span<const std::byte>(table), logits_RV.device());
  const auto* const bytes =
      static_cast<const std::byte*>(on_device.const_data_ptr());
  C10_CUDA_CHECK(k::EditLogits(
      {.num_rows = static_cast<int64_t>(edited.size()),
       .vocab = logits_RV.size(1),
       .logits_RV = logits_RV.mutable_data_ptr<float>(),
       .rows_N = reinterpret_cast<const k::EditedRow*>(bytes),
       .updates = reinterpret_cast<const k::EditUpdate*>(bytes + row_bytes)},
      ops::cuda::CurrentStream()));
}

}  // namespace weft::sampling::cuda
