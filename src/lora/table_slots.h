// The slots of the tables in lora_cuda.h. A slot is the place of one matrix in
// an adapter's buffer. A site has a slot for its stacked A, and then a slot for
// the B of each projection.
#ifndef WEFT_SRC_LORA_TABLE_SLOTS_H_
#define WEFT_SRC_LORA_TABLE_SLOTS_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/lora_table.h"
#include "src/lora/adapter_layout.h"
#include "src/lora/lora_linear.h"

namespace weft::lora::cuda {

// Returns the number of slots for all linear layers of a model and its head.
[[nodiscard]] int64_t NumSlots(const ModelShape& shape);
// Returns the first slot of a site.
[[nodiscard]] int64_t FirstSlot(const ModelShape& shape, const LoraSite& site);

// Sets the slots of a site, whose first slot is `first`. A slot's offsets count
// from `start` in the adapter's buffer. Leaves the slots unchanged if the
// adapter does not adapt the site.
void SetSlots(const GroupLayout& layout, ProjectionGroup group, int64_t first,
              int64_t start, std::vector<kernels::cuda::LoraMatrix>& slots);

// Numbers the distinct layouts of a routing. All layouts are for the same
// ModelShape and outlive the list.
class LayoutList {
 public:
  // Returns the layout's number. The first layout has number 0, and each new
  // one has the next number.
  int NumberOf(const AdapterLayout& layout);
  [[nodiscard]] const std::vector<const AdapterLayout*>& all() const {
    return layouts_;
  }

 private:
  std::vector<const AdapterLayout*> layouts_;
};

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_TABLE_SLOTS_H_
