// Prints the best instruction-set level of this machine, for POWERINFER_LEVELS=native.
#include <stdio.h>

#include "cpu.h"

int main() {
  fputs(cpu_levels().front().c_str(), stdout);
  return 0;
}
