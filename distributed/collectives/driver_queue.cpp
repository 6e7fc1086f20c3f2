// Queues operations of the CUDA driver on a stream, all in one call from Python.
//
// They are an array of 64-bit words, made by driver_queue.py, which describes each operation. The driver's functions are
// variables whose addresses the loader fills in.

#include <stddef.h>
#include <stdint.h>

#include "opcodes.h"

constexpr int MOST_ARGUMENTS = 16;

extern "C" {

int (*gs_copy)(uint64_t, uint64_t, size_t, void*);
int (*gs_write)(void*, uint64_t, uint32_t, unsigned);
int (*gs_wait)(void*, uint64_t, uint32_t, unsigned);
int (*gs_launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

// The driver's error of the first operation that fails, after which none is queued; or 0.
int gs_queue(const int64_t* at, int64_t count, void* stream) {
    for (const int64_t* end = at + count; at < end;) {
        int error = 0;
        switch (at[0]) {
        case COPY:
            error = gs_copy(at[1], at[2], at[3], stream);
            at += 4;
            break;
        case WRITE:
            error = gs_write(stream, at[1], at[2], 0);
            at += 3;
            break;
        case WAIT:
            // Until the word is at least the value, in the order of a clock of 32 bits.
            error = gs_wait(stream, at[1], at[2], 0);
            at += 3;
            break;
        default: {  // LAUNCH
            const int64_t arguments = at[6];
            if (arguments > MOST_ARGUMENTS) return -1;
            // Two scratch areas that these kernels do not use; a kernel reads as many parameters as it has.
            int64_t nothing = 0;
            void* parameters[MOST_ARGUMENTS + 2];
            for (int64_t index = 0; index < arguments; ++index)
                parameters[index] = const_cast<int64_t*>(at + 7 + index);
            parameters[arguments] = parameters[arguments + 1] = &nothing;
            error = gs_launch(reinterpret_cast<void*>(at[1]), at[2], at[3], 1, at[4], 1, 1, at[5], stream, parameters,
                              nullptr);
            at += 7 + arguments;
        }
        }
        if (error) return error;
    }
    return 0;
}
}
