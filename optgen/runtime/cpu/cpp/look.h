// The addresses, dtypes, devices and shapes of tensors that Python holds, read in one call.
#pragma once
#include <stdint.h>

extern "C" {

// DLTensor and DLPackExchangeAPI of DLPack 1.
struct View {
    char *data;
    int32_t device, number, dims;
    uint8_t type, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
};
struct Exchange {
    uint32_t major, minor;
    void *older, *others[3];
    int (*view)(void *tensor, View *out);
};

// Of Python's stable ABI.
void *PyList_GetItem(void *list, intptr_t i);
void *PyDict_GetItemWithError(void *dict, void *key);
void *PyCapsule_GetPointer(void *capsule, const char *name);

// Reads the tensors under each key of dicts, then those of a list: their addresses, and their layouts behind one another,
// of each a word of dtype, device, rank and contiguity, then the shape.
// counts: keys, dicts, tensors, the words that layouts may have.
// Returns 0; -1 after an error, Python's or that there are more words or another DLPack.
__attribute__((visibility("default"))) int optgen_look(void *exchange, void *keys, void *dicts, void *tensors,
                                                       const int64_t *counts, int64_t *addresses, int64_t *layouts) {
    const Exchange *torch = (const Exchange *)PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (!torch || torch->major != 1)
        return -1;
    const int64_t *end = layouts + counts[3];
    for (int64_t k = 0; k <= counts[0]; k++)
        for (int64_t i = 0; i < counts[k < counts[0] ? 1 : 2]; i++) {
            void *found = PyList_GetItem(k < counts[0] ? dicts : tensors, i);
            if (found && k < counts[0])
                found = PyDict_GetItemWithError(found, PyList_GetItem(keys, k));
            View t;
            if (!found || torch->view(found, &t) || layouts + 1 + t.dims > end)
                return -1;
            int64_t size = 1;
            bool dense = true;
            for (int d = t.dims; d-- > 0; size *= t.shape[d])
                dense = dense && (t.shape[d] == 1 || t.strides[d] == size);
            const int64_t dtype = t.type << 16 | t.bits << 8 | t.lanes;
            *addresses++ = (int64_t)(t.data + t.offset);
            *layouts++ = dtype << 32 | t.device << 24 | (t.number & 255) << 16 | t.dims << 1 | (dense || !size);
            for (int d = 0; d < t.dims; d++)
                *layouts++ = t.shape[d];
        }
    return 0;
}
}
