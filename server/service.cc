// Entry point of weftd.so, which weftd opens in order to serve.
#include "server/service.h"

#include "server/daemon.h"
#include "src/engine/engine.h"

extern "C" int WeftServe(const weft::Settings* settings) {
  return weft::RunDaemon(*settings, &weft::StartEngine);
}
