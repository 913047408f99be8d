// Passes one failpoint and prints its effect.
#include <cerrno>
#include <cstring>
#include <iostream>

#include "src/base/files/failpoint.h"

int main() {
  if (weft::Failpoint("probe")) {
    std::cout << "fails: " << std::strerror(errno) << "\n";
  } else {
    std::cout << "goes on\n";
  }
  return 0;
}
