// Restores the front after a restart from its ledger.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_RESTORE_H_
#define WEFT_SERVER_TINKER_RESTORE_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Restores sessions, models, sampling sessions, extras of checkpoints and
// adapters to delete. Then sets Front::restored. REQUIRES: the engine is ready.
void RestoreTables(Front& front);

// Waits until the adapters of all models are restored. Then runs the ledger's
// requests of steps again, in the order of their sequence numbers. Then sets
// Front::ready.
void RestoreSteps(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_RESTORE_H_
