// Packs the teachers' sequences of a micro-batch, and pairs their rows with the
// rows of the adapters that learn.
#ifndef WEFT_SRC_ENGINE_TRAIN_TEACHER_PACKER_H_
#define WEFT_SRC_ENGINE_TRAIN_TEACHER_PACKER_H_

#include <vector>

#include "src/engine/train/batch_packer.h"

namespace weft::engine {

// Sets packed.distill, and the rows and entries of the data whose losses have a
// teacher. Does nothing if there are none. `packed` has all other parts of
// these pieces. The sequences of one teacher share prompts as data do. A
// sequence ends with its last row that is compared.
void PackTeachers(const std::vector<TrainPiece>& pieces, bool share_prompts,
                  PackedTrain& packed);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_TRAIN_TEACHER_PACKER_H_
