// Is this step like the one before?  Looks at every parameter, gradient and state of an optimizer, 50 ns each (states
// 10 ns), where the same questions asked from Python take half a microsecond per parameter and field.
//
// Called with Python's lock held.  Python's functions are those of its stable ABI, declared by hand: its headers need
// not be installed.  Tensors are read through DLPack's table of functions (Tensor.__dlpack_c_exchange_api__).
#include <stdint.h>

extern "C" {
struct PyObject;
PyObject *PyList_GetItem(PyObject *, intptr_t);
intptr_t PyList_Size(PyObject *);
int PyList_SetItem(PyObject *, intptr_t, PyObject *);
int PyDict_Next(PyObject *, intptr_t *, PyObject **, PyObject **);
intptr_t PyDict_Size(PyObject *);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
int PyObject_IsTrue(PyObject *);
int PyObject_RichCompareBool(PyObject *, PyObject *, int);
long long PyLong_AsLongLong(PyObject *);
void PyErr_Clear(void);
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
}

namespace {

struct DLTensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
typedef int (*Reader)(void *object, DLTensor *out);
typedef void *(*Pointer)(PyObject *object);

// torch's stable functions from a tensor to what it is (aoti_torch_get_...), and where Python's objects of two types,
// Tensor and Parameter, have theirs; all zeros where that is not known.  They cost 20 ns together, the reader 53.
struct Shim {
    int (*dim)(const void *, int64_t *);
    int (*sizes)(const void *, int64_t **);
    int (*strides)(const void *, int64_t **);
    int (*dtype)(const void *, int32_t *);
    int (*device_type)(const void *, int32_t *);
    int (*device_index)(const void *, int32_t *);
    int (*layout)(const void *, int32_t *);
    int (*data)(const void *, void **);
    int (*offset)(const void *, int64_t *);
    int64_t at, types[2];
    int64_t dtypes[64], devices[64];  // what scripts write for torch's numbers, of devices without the index; 0: unknown

    // The tensor in an object of these types, else 0.
    const void *tensor(PyObject *object) const {
        const char *begin = (const char *)object;
        const int64_t type = *(const int64_t *)(begin + sizeof(intptr_t));
        return at && (type == types[0] || type == types[1]) ? begin + at : 0;
    }
};

inline int64_t dtype_of(const DLTensor &t) { return t.code | t.bits << 8 | (int64_t)t.lanes << 16; }
inline int64_t device_of(int64_t type, int64_t index) { return type | index << 32; }

// How tensors are read.
struct Eyes {
    Reader reader;
    Pointer pointer;
    const Shim *shim;
};

// What there is of a tensor.
struct View {
    int64_t address, device, dtype, ndim;
    const int64_t *shape, *strides;
};

// False where it is no tensor, or one without memory of its own.
inline bool look(PyObject *object, const Eyes &eyes, View *v) {
    const Shim &shim = *eyes.shim;
    if (const void *tensor = shim.tensor(object)) {
        int32_t layout, dtype, type, index;
        int64_t *sizes, *strides;
        void *data;
        if (shim.layout(tensor, &layout) || layout != 0 || shim.dim(tensor, &v->ndim) || shim.sizes(tensor, &sizes) ||
            shim.strides(tensor, &strides) || shim.dtype(tensor, &dtype) || shim.device_type(tensor, &type) ||
            shim.device_index(tensor, &index) || shim.data(tensor, &data))
            return false;
        v->address = (int64_t)data;
        v->device = device_of(shim.devices[type & 63], index < 0 ? 0 : index);
        v->dtype = shim.dtypes[dtype & 63];
        v->shape = sizes;
        v->strides = strides;
        return true;
    }
    DLTensor t;
    if (eyes.reader(object, &t)) {
        PyErr_Clear();
        return false;
    }
    v->address = (int64_t)t.data + (int64_t)t.byte_offset;
    v->device = device_of(t.device_type, t.device_id);
    v->dtype = dtype_of(t);
    v->ndim = t.ndim;
    v->shape = t.shape;
    v->strides = t.strides;
    return true;
}

// What a tensor is to be: [device, dtype, dimensions, size of each], within a script.
struct Form {
    int64_t device, dtype, ndim;
    const int64_t *shape;
};
inline Form form(const int64_t *&at) {
    Form f = {at[0], at[1], at[2], at + 3};
    at += 3 + f.ndim;
    return f;
}

// Whether `object` is a contiguous tensor of that form.  Empty ones are always contiguous.
inline bool fits(PyObject *object, const Form &form, int64_t dtype, const Eyes &eyes, View *v, int64_t *numel) {
    if (!look(object, eyes, v) || v->device != form.device || v->ndim != form.ndim || v->dtype != dtype)
        return false;
    int64_t count = 1;
    bool dense = true;
    for (int64_t d = form.ndim - 1; d >= 0; d--) {
        if (v->shape[d] != form.shape[d])
            return false;
        dense = dense && (v->shape[d] == 1 || v->strides[d] == count);
        count *= v->shape[d];
    }
    *numel = count;
    return count == 0 || (dense && v->address);
}

// Whether a tensor that `look` has seen lies behind the beginning of some memory: what was freed, and zeros of torch's that
// never had any, have the address that is their offset.
inline bool has_memory(PyObject *object, PyObject *called, const Eyes &eyes, const View &v) {
    int64_t offset = -1;
    if (const void *tensor = eyes.shim->tensor(object)) {
        if (eyes.shim->offset(tensor, &offset))
            return false;
    } else {
        PyObject *found = PyObject_CallMethodObjArgs(object, called, (PyObject *)0);
        if (found) {
            offset = PyLong_AsLongLong(found);
            Py_DecRef(found);
        }
        if (offset < 0) {
            PyErr_Clear();
            return false;
        }
    }
    return v.address != offset * ((v.dtype >> 8 & 255) / 8);
}

// Whether the tensor that was there at the last step has its memory where it had it: 4 to 13 ns.
inline bool stays(PyObject *object, int64_t address, const Eyes &eyes) {
    void *data;
    if (const void *tensor = eyes.shim->tensor(object))
        return !eyes.shim->data(tensor, &data) && (int64_t)data == address;
    try {
        return eyes.pointer && (int64_t)eyes.pointer(object) == address;
    } catch (...) {  // no tensor, or one without memory of its own
        return false;
    }
}

enum Kind { NUMBER = 0, TENSOR = 1, OTHER = 2, SHARD = 3 };

// What attributes are called, as Python's strings; and where instances of one type, DTensor, have two of them: 5 ns
// instead of 35.
struct Names {
    PyObject *grad, *is_neg, *offset, *part, *spec, *mesh, *placements;
    int64_t type, part_at, spec_at;
};

// A reference that is given back at the end of its scope, where it is owned.
struct Held {
    PyObject *object;
    bool owned;
    explicit Held(PyObject *object, bool owned = true) : object(object), owned(owned) {}
    Held(const Held &) = delete;
    ~Held() {
        if (object && owned)
            Py_DecRef(object);
    }
};

// An attribute that instances of `names.type` have `at` so many bytes from their beginning (0: not known), where `type`
// stands behind the reference count; there the object itself keeps it alive.
inline Held slot(PyObject *object, PyObject *name, int64_t at, const Names &names) {
    const char *begin = (const char *)object;
    if (at && *(const int64_t *)(begin + sizeof(intptr_t)) == names.type) {
        PyObject *found = *(PyObject *const *)(begin + at);
        if (found)
            return Held(found, false);
    }
    return Held(PyObject_GetAttr(object, name));
}
inline Held part_of(PyObject *tensor, const Names &names) { return slot(tensor, names.part, names.part_at, names); }

inline bool equal(PyObject *a, PyObject *b, PyObject *name) {
    const Held x(PyObject_GetAttr(a, name)), y(PyObject_GetAttr(b, name));
    return x.object && y.object && PyObject_RichCompareBool(x.object, y.object, 2) == 1;
}

// Whether a DTensor lies over the mesh as `spec` says.
inline bool lies(PyObject *tensor, PyObject *spec, const Names &names) {
    const Held own = slot(tensor, names.spec, names.spec_at, names);
    if (!own.object)
        return false;
    return own.object == spec || (equal(own.object, spec, names.mesh) && equal(own.object, spec, names.placements));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *optgen_stamp() { return OPTGEN_STAMP; }

// The dtype of a tensor as scripts write it; -1 where there is none.
EXPORT int64_t optgen_dtype(PyObject *tensor, Reader reader) {
    DLTensor t;
    if (reader(tensor, &t)) {
        PyErr_Clear();
        return -1;
    }
    return dtype_of(t);
}

// The device of a tensor as scripts write it; -1 where there is none.
EXPORT int64_t optgen_device(PyObject *tensor, Reader reader) {
    DLTensor t;
    if (reader(tensor, &t)) {
        PyErr_Clear();
        return -1;
    }
    return device_of(t.device_type, t.device_id);
}

// lists     a list of the groups' lists of parameters
// state     the optimizer's dict of states
// held      two lists to fill: the gradients, and the states in the order of their buckets
// called    "grad", "is_neg", "storage_offset", and of DTensors "_local_tensor", "_spec"; of the latter "mesh", "placements"
// slots     the type DTensor, and where its instances have "_local_tensor" and "_spec"; zeros where that is not known
// script    what is expected, first of the groups, then of the states:
//             groups, per group: parameters, per parameter: id, dtype of the gradient or -1 for none; if any: address
//             of the row or 0, of a DTensor the address of its spec, which is kept alive, or 0, form of its part here
//             states, per state: id of the parameter, position in `held` or -1; if any: address of the row or 0, items,
//             per item: id of the key, kind; NUMBER: index; TENSOR or SHARD, of a DTensor: id, column, form
// numbers   ids of the numbers that states hold
// reader    DLPack's dltensor_from_py_object_no_sync of torch
// pointer   torch's function from a tensor to its address, or 0
// shim      see above
// moved     becomes how many gradients lie elsewhere than the rows say, and of how many the address modulo 16 is another
// Returns 0 and has filled `held` and the gradients' addresses into the rows; else where it saw a difference.
EXPORT int64_t optgen_replay(PyObject *lists, PyObject *state, PyObject *grads, PyObject *entries,
                             PyObject *const *called, PyObject *none, const int64_t *script, const int64_t *numbers,
                             Reader reader, Pointer pointer, const Shim *shim, const int64_t *slots, int64_t *moved) {
    const Names names = {called[0], called[1], called[2], called[3], called[4], called[5], called[6],
                         slots[0],  slots[1],  slots[2]};
    const Eyes eyes = {reader, pointer, shim};
    const int64_t *at = script;
    View t;
    int64_t numel, live = 0;
    moved[0] = moved[1] = 0;
    const int64_t groups = *at++;
    for (int64_t k = 0; k < groups; k++) {
        PyObject *list = PyList_GetItem(lists, k);
        const int64_t count = *at++;
        if (!list || PyList_Size(list) != count) {
            PyErr_Clear();
            return 1;
        }
        for (int64_t i = 0; i < count; i++) {
            PyObject *p = PyList_GetItem(list, i);
            if (!p || (int64_t)p != at[0]) {
                PyErr_Clear();
                return 2;
            }
            const int64_t dtype = at[1];
            Py_IncRef(p);  // attributes of a subclass may run anything
            PyObject *g = PyObject_GetAttr(p, names.grad);
            Py_DecRef(p);
            if (!g) {
                PyErr_Clear();
                return 3;
            }
            if (dtype < 0) {
                Py_DecRef(g);
                if (g != none)
                    return 4;
                at += 2;
                continue;
            }
            PyList_SetItem(grads, live++, g);  // takes over the reference
            int64_t *row = (int64_t *)at[2];
            PyObject *spec = (PyObject *)at[3];
            at += 4;
            const Form want = form(at);
            const Held part = spec ? part_of(p, names) : Held(0), grad = spec ? part_of(g, names) : Held(0);
            if (spec) {
                if (!part.object || !grad.object || !lies(g, spec, names)) {
                    PyErr_Clear();
                    return 14;
                }
                g = grad.object;
            }
            if (!fits(spec ? part.object : p, want, want.dtype, eyes, &t, &numel) || (row && t.address != row[0]))
                return 5;
            if (!fits(g, want, dtype, eyes, &t, &numel))
                return 6;
            if (numel && !has_memory(g, names.offset, eyes, t))
                return 17;
            if (numel == 1) {  // the one size at which a conjugate's imaginary part, negated lazily, is contiguous
                PyObject *lazy = PyObject_CallMethodObjArgs(g, names.is_neg, (PyObject *)0);
                const int yes = lazy ? PyObject_IsTrue(lazy) : 1;
                if (lazy)
                    Py_DecRef(lazy);
                if (yes) {
                    PyErr_Clear();
                    return 7;
                }
            }
            if (row && row[1] != t.address) {
                moved[0]++;
                moved[1] += ((row[1] ^ t.address) & 15) != 0;
                row[1] = t.address;
            }
        }
    }
    const int64_t states = *at++;
    if (PyDict_Size(state) != states) {
        PyErr_Clear();
        return 8;
    }
    intptr_t position = 0;
    PyObject *key, *entry;
    for (int64_t k = 0; k < states; k++) {
        if (!PyDict_Next(state, &position, &key, &entry) || (int64_t)key != at[0])
            return 9;
        const int64_t place = at[1];
        at += 2;
        if (place < 0)
            continue;
        const int64_t *row = (const int64_t *)at[0];
        const int64_t items = at[1];
        at += 2;
        if (PyDict_Size(entry) != items) {
            PyErr_Clear();
            return 10;
        }
        intptr_t inner = 0;
        PyObject *name, *value;
        for (int64_t i = 0; i < items; i++) {
            if (!PyDict_Next(entry, &inner, &name, &value) || (int64_t)name != at[0])
                return 11;
            const int64_t kind = at[1];
            at += 2;
            if (kind == NUMBER) {
                if ((int64_t)value != numbers[*at++])
                    return 12;
            } else if (kind == SHARD) {
                const int64_t column = at[1];
                const bool same = (int64_t)value == at[0];
                at += 2;
                const Form want = form(at);
                if (!same)
                    return 15;
                const Held part = part_of(value, names);
                if (part.object && row && stays(part.object, row[column], eyes))
                    continue;
                if (!part.object || !fits(part.object, want, want.dtype, eyes, &t, &numel) ||
                    (row && t.address != row[column])) {
                    PyErr_Clear();
                    return 16;
                }
            } else if (kind == TENSOR) {
                const bool same = (int64_t)value == at[0];
                const int64_t column = at[1];
                at += 2;
                const Form want = form(at);
                if (same && row && stays(value, row[column], eyes))
                    continue;
                if (!fits(value, want, want.dtype, eyes, &t, &numel) || (row && t.address != row[column]))
                    return 13;
            }
        }
        Py_IncRef(entry);
        PyList_SetItem(entries, place, entry);
    }
    return 0;
}
