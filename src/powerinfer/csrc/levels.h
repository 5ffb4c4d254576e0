// The instruction-set levels of this build and which of them this CPU can run.
#pragma once
#include <string>
#include <vector>

#include "table.h"

// Levels of this build that this CPU (and its operating system) can run, best first.
std::vector<const PiKernels*> supported_levels();
// Levels that this CPU can run and this build lacks, best first.
std::vector<std::string> levels_not_built();
// Throws std::invalid_argument for a name that is unknown or cannot run here; an empty name is the best level.
const PiKernels* find_level(const std::string& name);
