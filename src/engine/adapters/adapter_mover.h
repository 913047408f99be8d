// Moves adapters between device, host and disk. src/dispatch/residency.h
// chooses the moves.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MOVER_H_
#define WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MOVER_H_

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "src/base/files/spill_folder.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/engine_context.h"

namespace weft::engine {

// Threads: engine thread. The I/O thread reads and writes the files.
class AdapterMover {
 public:
  // `context` and `spill` outlive the mover.
  AdapterMover(const EngineContext* context, const SpillFolder* spill)
      : context_(*context), spill_(*spill) {}

  // Makes the move. Reports its end to the dispatcher: at once, or after the
  // I/O thread has written or read the file. If the adapter is removed
  // meanwhile, reports nothing.
  void Run(const dispatch::Move& move);
  // If the store does not answer, lets the moves that read from it wait, so
  // that other adapters get their slots. Call it between two pieces of work.
  void GoOn();
  // Reads the image of an adapter on disk, which stays there. `image` is the
  // adapter's (AdapterTable::Image), and gets its tensors of `size` floats.
  // Blocks on the disk. Threads: any.
  absl::Status Read(const ImageFile& file, int64_t size,
                    lora::AdapterImage& image) const;
  // Removes a spill file that is no longer needed. Does nothing to a file of
  // the state folder (ImageFile::durable).
  void RemoveFile(ImageFile file);

 private:
  // Moves an adapter from the device to the host or back.
  void InMemory(const dispatch::Move& move);
  void ToDisk(const dispatch::Move& move);
  void FromDisk(const dispatch::Move& move);
  // Lets the move begin anew when the store answers.
  void Postpone(const dispatch::Move& move, const absl::Status& status);
  void Finish(const dispatch::Move& move, uint64_t bytes,
              const absl::Status& status);

  const EngineContext& context_;
  const SpillFolder& spill_;
  // The moves that read from the state, by Move::id.
  std::map<uint64_t, dispatch::Move> reading_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_ADAPTER_MOVER_H_
