// The file of --config: a JSON object. Each name is a flag without its dashes.
// Comments with // are allowed.
//
//   {
//     // Two tenants share this server.
//     "model": "/models/base",
//     "max-rank": 64,
//     "tenant-weights": "research=3,nightly=1"
//   }
#ifndef WEFT_SERVER_FLAGS_CONFIG_FILE_H_
#define WEFT_SERVER_FLAGS_CONFIG_FILE_H_

#include <string>
#include <vector>

#include "server/flags/flags.h"

namespace weft::server {

// Reads the file's settings into `settings`. Adds an error to `errors` for each
// name that is unknown, repeated or not allowed in a file, and for each value
// that does not parse. Adds an error and stops if the file cannot be read or is
// not one flat JSON object.
void ReadConfigFile(const std::string& path, Settings* settings,
                    std::vector<std::string>* errors);

// Returns all settings in the form of a --config file. Each setting that was
// given explicitly has a comment that names its source.
std::string ConfigText(const Settings& settings);

}  // namespace weft::server

#endif  // WEFT_SERVER_FLAGS_CONFIG_FILE_H_
