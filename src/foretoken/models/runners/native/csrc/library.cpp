// What a library of the decoder has once, whatever kinds of weights and caches are linked into it.
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "pool.hpp"

#include "kinds.hpp"

KindFunctions FUNCTIONS[KIND_COUNT];

extern "C" {

// Returns whether the kernels can run here. Requests the tile registers from the system if they are used.
int foretoken_ready() {
#if defined(__AMX_TILE__) && defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 1;
#endif
}

void foretoken_use_pool(const void* functions) { POOL = (const PoolFunctions*)functions; }

}  // extern "C"
