// Runs a guard program: the steps that find what was read, and the conditions on it, in one call from Python.
//
// The program is an array of 64-bit words, made by guard_program.py, which describes each instruction. An operand that
// is not negative is a register; a negative one is the constant of index ~operand. Registers hold first the arguments,
// then what each reading instruction found, in order. A condition that fails ends the run with the number of its guard.
//
// Torch's functions are C symbols whose addresses the loader fills in, which also finds the few fields that are read
// directly; see toolchain/torch_library.py.

#include <alloca.h>
#include <string.h>

#include "opcodes.h"
#include "python_objects.h"

extern "C" {

// Filled in by the loader.
int (*gs_get_dtype)(Handle, int32_t*);
int (*gs_get_layout)(Handle, int32_t*);
int (*gs_get_device_type)(Handle, int32_t*);
int (*gs_get_device_index)(Handle, int32_t*);
int (*gs_get_dim)(Handle, int64_t*);
int (*gs_get_sizes)(Handle, int64_t**);
int (*gs_get_strides)(Handle, int64_t**);
int (*gs_get_numel)(Handle, int64_t*);
int (*gs_get_storage_offset)(Handle, int64_t*);
size_t (*gs_dtype_size)(int32_t);
bool (*gs_requires_grad)(const void*);
int64_t gs_keys_offset;  // of the dispatch keys in the implementation
uint64_t gs_lazy_keys;   // the keys of lazily conjugated and negated tensors, and of zeros without memory
}

namespace {

enum Outcome { FAILS = 0, HOLDS = 1, RAISED = -1 };

constexpr int IS_EQUAL = 2;  // Py_EQ

void* implementation(Handle tensor) { return *reinterpret_cast<void**>(tensor); }

uint64_t lazy_keys(void* impl) {
    return *reinterpret_cast<uint64_t*>(static_cast<char*>(impl) + gs_keys_offset) & gs_lazy_keys;
}

PyObject* read_item(PyObject* container, PyObject* key) {
    if (container->type != &PyDict_Type) return PyObject_GetItem(container, key);
    PyObject* found = PyDict_GetItemWithError(container, key);
    if (found) Py_IncRef(found);
    return found;  // no KeyError is made where there is none: the run ends all the same
}

int has_keys(PyObject* mapping, PyTupleObject* keys) {
    if (mapping->type != &PyDict_Type) {  // another order may rule
        PyObject* found = PySequence_Tuple(mapping);
        if (!found) return RAISED;
        const int equal = PyObject_RichCompareBool(found, &keys->head, IS_EQUAL);
        Py_DecRef(found);
        return equal;
    }
    if (PyDict_Size(mapping) != keys->size) return FAILS;
    intptr_t position = 0;
    PyObject *key, *value;
    for (intptr_t index = 0; PyDict_Next(mapping, &position, &key, &value); ++index) {
        if (key == keys->items[index]) continue;
        Py_IncRef(key);
        int equal = PyObject_RichCompareBool(key, keys->items[index], IS_EQUAL);
        Py_DecRef(key);
        if (equal != 1) return equal;
        if (PyDict_Size(mapping) != keys->size) return FAILS;  // the comparison ran Python
    }
    return HOLDS;
}

int contains(PyObject* container, PyObject* key) {
    return container->type == &PyDict_Type ? PyDict_Contains(container, key) : PySequence_Contains(container, key);
}

int all_false(PyObject* mapping, PyTupleObject* keys) {
    for (intptr_t index = 0; index < keys->size; ++index) {
        PyObject* value = read_item(mapping, keys->items[index]);
        if (!value) return RAISED;
        int truth = PyObject_IsTrue(value);
        Py_DecRef(value);
        if (truth) return truth < 0 ? RAISED : FAILS;
    }
    return HOLDS;
}

// words: lazy keys, requires_grad, dtype, layout, device type, device index (-1: any), dimensions, sizes, strides
bool matches(Handle tensor, const int64_t* words) {
    void* impl = implementation(tensor);
    int32_t number;
    int64_t dimensions, *extent;
    if (lazy_keys(impl) != uint64_t(words[0]) || gs_requires_grad(impl) != bool(words[1])) return false;
    if (gs_get_dtype(tensor, &number) || number != words[2]) return false;
    if (gs_get_layout(tensor, &number) || number != words[3]) return false;
    if (gs_get_device_type(tensor, &number) || number != words[4]) return false;
    if (words[5] >= 0 && (gs_get_device_index(tensor, &number) || number != words[5])) return false;
    if (gs_get_dim(tensor, &dimensions) || dimensions != words[6]) return false;
    const size_t bytes = dimensions * sizeof(int64_t);
    if (gs_get_sizes(tensor, &extent) || memcmp(extent, words + 7, bytes)) return false;
    return !gs_get_strides(tensor, &extent) && !memcmp(extent, words + 7 + dimensions, bytes);
}

// The address of the storage; null where there is nothing to share.
bool storage_of(Handle tensor, char** storage) {
    int64_t count, offset;
    int32_t dtype;
    void* data;
    if (gs_get_numel(tensor, &count)) return false;
    *storage = nullptr;
    if (count == 0) return true;
    if (gs_get_data_ptr(tensor, &data) || gs_get_storage_offset(tensor, &offset) || gs_get_dtype(tensor, &dtype))
        return false;
    *storage = static_cast<char*>(data) - offset * int64_t(gs_dtype_size(dtype));
    return true;
}

bool apart(PyObject* one, PyObject* other) {
    char *first, *second;
    return one != other && storage_of(handle_in(one), &first) && storage_of(handle_in(other), &second) && (first != second || !first);
}

// The number of the guard that fails, -1 where a step raises, -2 if all hold; then ``next`` is what RETURN returns.
long long run(const int64_t*& next, PyObject** constants, PyObject** registers, int64_t& filled) {
    const int64_t* word = next;
    auto operand = [&](int64_t which) { return which >= 0 ? registers[which] : constants[~which]; };
    for (;;) {
        const int64_t guard = word[1];  // of conditions
        int holds = HOLDS;
        PyObject* found = nullptr;
        switch (word[0]) {
        case ATTRIBUTE:
            if (!(found = PyObject_GetAttr(operand(word[1]), operand(word[2])))) return -1;
            registers[filled++] = found;
            word += 3;
            continue;
        case INSTANCE_DICT:
            if (!(found = PyObject_GenericGetDict(operand(word[1]), nullptr))) return -1;
            registers[filled++] = found;
            word += 2;
            continue;
        case ITEM:
            if (!(found = read_item(operand(word[1]), operand(word[2])))) return -1;
            registers[filled++] = found;
            word += 3;
            continue;
        case CALL:
        case EXPRESSION: {
            const int64_t count = word[3];
            PyObject* arguments[count + 1];
            for (int64_t index = 0; index < count; ++index) arguments[index] = operand(word[4 + index]);
            if (!(found = PyObject_Vectorcall(operand(word[2]), arguments, count, nullptr))) return -1;
            if (word[0] == CALL) {
                registers[filled++] = found;
            } else {
                holds = PyObject_IsTrue(found);
                Py_DecRef(found);
            }
            word += 4 + count;
            break;
        }
        case TYPE:
            holds = operand(word[2])->type == operand(word[3]);
            word += 4;
            break;
        case IDENTITY:
            holds = operand(word[2]) == operand(word[3]);
            word += 4;
            break;
        case DISTINCT:
            holds = operand(word[2]) != operand(word[3]);
            word += 4;
            break;
        case EQUAL: {
            PyObject *value = operand(word[2]), *expected = operand(word[3]);
            if (value != expected)
                holds = value->type == expected->type ? PyObject_RichCompareBool(value, expected, IS_EQUAL) : FAILS;
            word += 4;
            break;
        }
        case LENGTH: {
            const intptr_t length = PyObject_Size(operand(word[2]));
            holds = length < 0 ? RAISED : length == word[3];
            word += 4;
            break;
        }
        case KEYS:
            holds = has_keys(operand(word[2]), reinterpret_cast<PyTupleObject*>(operand(word[3])));
            word += 4;
            break;
        case PRESENT:
            holds = contains(operand(word[2]), operand(word[3]));
            word += 4;
            break;
        case ABSENT:
            holds = contains(operand(word[2]), operand(word[3]));
            if (holds >= 0) holds = !holds;
            word += 4;
            break;
        case ALL_FALSE:
            holds = all_false(operand(word[2]), reinterpret_cast<PyTupleObject*>(operand(word[3])));
            word += 4;
            break;
        case TENSOR: {
            PyObject* tensor = operand(word[2]);
            holds = tensor->type == operand(word[3]) && matches(handle_in(tensor), word + 4);
            word += 11 + 2 * word[10];
            break;
        }
        case APART:
            holds = apart(operand(word[2]), operand(word[3]));
            word += 4;
            break;
        case RETURN:
            next = word + 1;
            return -2;
        default:
            return -1;
        }
        if (holds != HOLDS) return holds == FAILS ? guard : -1;
    }
}

// ``self`` is the tuple of the program's bytes and the tuple of its constants.
PyObject* check(PyObject* self, PyObject* const* arguments, intptr_t count) {
    PyTupleObject* parts = reinterpret_cast<PyTupleObject*>(self);
    PyObject** constants = reinterpret_cast<PyTupleObject*>(parts->items[1])->items;
    const int64_t* next = reinterpret_cast<const int64_t*>(PyBytes_AsString(parts->items[0]));
    PyObject** registers = static_cast<PyObject**>(alloca((*next++ + count + 1) * sizeof(PyObject*)));
    memcpy(registers, arguments, count * sizeof(PyObject*));
    int64_t filled = count;
    const long long failed = run(next, constants, registers, filled);
    PyObject* result = nullptr;
    if (failed == -2) {
        const int64_t inputs = *next++;
        result = PyList_New(inputs);
        for (int64_t index = 0; result && index < inputs; ++index) {
            PyObject* input = next[index] >= 0 ? registers[next[index]] : constants[~next[index]];
            Py_IncRef(input);
            PyList_SetItem(result, index, input);
        }
    } else {
        const bool raised = PyErr_Occurred() != nullptr;
        // KeyboardInterrupt, say; and a lack of memory, which is no reason to compile anew
        const bool passes_on =
            raised && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError));
        if (raised && !passes_on) PyErr_Clear();
        result = passes_on ? nullptr : PyLong_FromLongLong(failed);
    }
    for (int64_t index = count; index < filled; ++index) Py_DecRef(registers[index]);
    return result;
}

}  // namespace

extern "C" {
MethodDefinition gs_check = {"check", check, METH_FASTCALL, nullptr};
}
