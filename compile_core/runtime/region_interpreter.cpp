// Runs a region's program: allocates its buffers, launches its kernels, calls torch's operators, frees what is used up,
// all in one call from Python.
//
// The program is an array of 64-bit words, made by encode_program.py, which describes each instruction. A register
// holds a tensor, as a Python object or, for most of those that are made here, without one; or another Python object.
// Python's lock is given back while kernels run and taken when Python is needed. Whatever fails in C is done again by
// the Python function that means the same, and that raises what Python would.
//
// Torch's functions are C symbols whose addresses the loader fills in; see toolchain/torch_library.py.

#include <alloca.h>
#include <string.h>

#include <utility>

#include "opcodes.h"
#include "python_objects.h"

extern "C" {

// Filled in by the loader.
int (*gs_empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
int (*gs_view)(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*);
int (*gs_delete)(Handle);
PyObject* (*gs_wrap)(Handle);      // THPVariable_Wrap
PyObject* gs_tensor_type;          // torch.Tensor
// The driver's; null where there is none.
int (*gs_launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**);
int (*gs_current_context)(void**);
// What profilers listen to; null where torch has none of it.
bool (*gs_has_listeners)();  // at::hasCallbacks
int (*gs_record_start)(const char*, void*, void*, uint64_t, void**);
int (*gs_record_end)(void*);
}

namespace {

struct Register {
    PyObject* object;  // owned; null: the handle is
    Handle tensor;
    char* data;  // the tensor's address once it was asked for
};

bool is_tensor(PyObject* object) {
    return object->type == gs_tensor_type || PyType_IsSubtype(object->type, gs_tensor_type);
}

// What the words of an OPERATOR refer to.
struct Operands {
    const int64_t* instruction;
    Register* registers;
    Handle* results;
    const int64_t* optional_list;
};

// An argument of an operator in C, of the type that the operator takes.
template <Kind kind> auto argument(Operands& operands, int64_t word) {
    if constexpr (kind == INTEGER) {
        return word;
    } else if constexpr (kind == BOOL || kind == DTYPE) {
        return int32_t(word);
    } else if constexpr (kind == DOUBLE) {
        double number;
        memcpy(&number, &word, sizeof number);
        return number;
    } else if constexpr (kind == TENSOR) {
        return operands.registers[word].tensor;
    } else if constexpr (kind == OPTIONAL_TENSOR) {
        return word < 0 ? nullptr : &operands.registers[word].tensor;
    } else if constexpr (kind == INTEGERS) {
        return operands.instruction + word;
    } else if constexpr (kind == OPTIONAL_INTEGERS) {
        operands.optional_list = operands.instruction + word;
        return word ? &operands.optional_list : nullptr;
    } else if constexpr (kind == BOOLS) {
        return reinterpret_cast<const int32_t*>(operands.instruction + word);
    } else {
        static_assert(kind == RESULT);
        return &operands.results[word];
    }
}

template <Kind... kinds> struct Signature {
    typedef int (*Function)(decltype(argument<kinds>(std::declval<Operands&>(), 0))...);
    static_assert((0 + ... + (kinds == OPTIONAL_INTEGERS)) <= 1, "one list at most is kept");

    // What the function returns, 0 if all went well; 1 where an operand is no tensor.
    static int call(void* function, Operands& operands, const int64_t* words) {
        return call(function, operands, words, std::make_index_sequence<sizeof...(kinds)>());
    }

private:
    template <size_t... k>
    static int call(void* function, Operands& operands, const int64_t* words, std::index_sequence<k...>) {
        const bool are_tensors =
            (... && ((kinds != TENSOR && kinds != OPTIONAL_TENSOR) || words[k] < 0 || operands.registers[words[k]].tensor));
        return are_tensors ? reinterpret_cast<Function>(function)(argument<kinds>(operands, words[k])...) : 1;
    }
};

int (*const SIGNATURES[])(void*, Operands&, const int64_t*) = {GS_SIGNATURES};

// Has a profiler see a kernel, or an operator that is not called through torch's dispatcher. With none on, it costs a
// comparison.
class Recorded {
public:
    Recorded(bool is_heard, PyObject* name) {
        if (is_heard && gs_record_start(PyBytes_AsString(name), nullptr, nullptr, 0, &record)) record = nullptr;
    }
    ~Recorded() {
        if (record) gs_record_end(record);
    }
    Recorded(const Recorded&) = delete;

private:
    void* record = nullptr;
};

PyObject* wrap(Handle tensor) {
    try {
        return gs_wrap(tensor);
    } catch (...) {  // torch throws where there is no memory for the object
        return PyErr_NoMemory();
    }
}

class Run {
public:
    Run(PyObject* self, void* stream) : stream(stream), is_heard(gs_has_listeners && gs_has_listeners()) {
        PyObject** parts = reinterpret_cast<PyTupleObject*>(self)->items;
        word = reinterpret_cast<const int64_t*>(PyBytes_AsString(parts[0]));
        constants = reinterpret_cast<PyTupleObject*>(parts[1])->items;
        filename = parts[2];
        count = *word++;
        registers = static_cast<Register*>(PyMem_RawCalloc(count + 1, sizeof(Register)));
    }

    ~Run() {
        hold();
        for (int64_t index = 0; registers && index < count; ++index) clear(registers[index]);
        PyMem_RawFree(registers);
    }

    // The registers of the inputs. The list is emptied, so that an input is freed after its last use.
    bool read(PyObject* inputs) {
        if (!registers) return PyErr_NoMemory();
        const intptr_t expected = *word++;
        if (PyList_Size(inputs) != expected)
            return raise(PyExc_TypeError, "a region was called with another number of tensors than it takes");
        for (intptr_t index = 0; index < expected; ++index) {
            PyObject* input = PyList_GetItem(inputs, index);
            Py_IncRef(input);
            set(registers[index], input);
        }
        return PyList_SetSlice(inputs, 0, expected, nullptr) == 0;
    }

    PyObject* run() {
        for (;;) {
            const int64_t* at = word;
            switch (at[0]) {
            case CONSTANT:
                Py_IncRef(constants[at[2]]);
                set(registers[at[1]], constants[at[2]]);
                word += 3;
                break;
            case ALLOCATE:
                if (!allocate(at)) return nullptr;
                word += 7 + 2 * at[6];
                break;
            case TAKE:
                word += 3 + at[2];
                if (take(at, word)) word += 7 + 2 * word[6];
                break;
            case VIEW:
                if (!view(at)) return nullptr;
                word += 5 + 2 * at[4];
                break;
            case RUN:
                if (!launch(at, at + 5, at[3], constants[at[4]])) return nullptr;
                word += 5 + 2 * at[3];
                break;
            case LAUNCH:
                if (!launch(at, at + 10, at[3], constants[at[9]])) return nullptr;
                word += 10 + 2 * at[3];
                break;
            case OPERATOR:
                word += operate(at) ? at[4] : at[3];
                break;
            case CALL:
                if (!call(at)) return nullptr;
                word += 6 + at[4] + at[5];
                break;
            case PACK:
                if (!pack(at)) return nullptr;
                word += 4 + at[3];
                break;
            case FREE:
                for (int64_t index = 0; index < at[1]; ++index) clear(registers[at[2 + index]]);
                word += 2 + at[1];
                break;
            default:  // RETURN
                return packed(at + 2, at[1], &PyTuple_Type);
            }
        }
    }

private:
    const int64_t* word;
    PyObject** constants;
    PyObject* filename;
    Register* registers;
    int64_t count;
    void* stream;
    bool is_heard;
    void* thread = nullptr;  // while Python's lock is given back
    bool has_context = false;

    void hold() {
        if (thread) PyEval_RestoreThread(thread);
        thread = nullptr;
    }
    void release() {
        if (!thread) thread = PyEval_SaveThread();
    }

    // Takes the reference.
    static void set(Register& place, PyObject* object) {
        place = {object, is_tensor(object) ? handle_in(object) : nullptr, nullptr};
    }

    void clear(Register& place) {
        Register old = place;
        place = {nullptr, nullptr, nullptr};
        if (old.object) {
            hold();
            Py_DecRef(old.object);
        } else if (old.tensor) {
            gs_delete(old.tensor);
        }
    }

    // Needs Python's lock.
    PyObject* object_of(Register& place) {
        if (!place.object && place.tensor) {
            PyObject* object = wrap(place.tensor);
            if (!object) return nullptr;
            gs_delete(place.tensor);
            place.object = object;
            place.tensor = handle_in(object);
        }
        return place.object;
    }

    PyObject* operand(int64_t which) { return which >= 0 ? object_of(registers[which]) : constants[~which]; }

    bool raise(PyObject* type, const char* message) {
        hold();
        PyErr_SetString(type, message);
        return false;
    }
    bool raise_no_tensor() { return raise(PyExc_TypeError, "an operator returned something else than was traced"); }

    // register, dtype, device type, device index, function, dimensions, sizes, strides
    bool allocate(const int64_t* at) {
        const int64_t* sizes = at + 7;
        Handle made;
        if (gs_empty_strided(at[6], sizes, sizes + at[6], at[2], at[3], at[4], &made) == 0) {
            registers[at[1]].tensor = made;
            return true;
        }
        hold();
        PyObject* object = PyObject_Vectorcall(constants[at[5]], nullptr, 0, nullptr);
        if (object) set(registers[at[1]], object);
        return object != nullptr;
    }

    // function, count, registers; the ALLOCATE in whose place memory may be taken. The function looks at what holds a
    // tensor besides Python.
    bool take(const int64_t* at, const int64_t* allocation) {
        hold();
        const int64_t *sizes = allocation + 7, dimensions = allocation[6];
        for (int64_t index = 0; index < at[2]; ++index) {
            Register& old = registers[at[3 + index]];
            PyObject* object = object_of(old);
            PyObject* answer = object && object->references == 1
                                   ? PyObject_Vectorcall(constants[at[1]], &object, 1, nullptr)
                                   : nullptr;
            const bool is_free = answer && PyObject_IsTrue(answer) == 1;
            if (answer) Py_DecRef(answer);
            PyErr_Clear();
            Handle made;
            if (is_free && !gs_view(old.tensor, dimensions, sizes, sizes + dimensions, 0, &made)) {
                registers[allocation[1]].tensor = made;
                return true;
            }
        }
        return false;
    }

    // register, base, offset from the base's beginning, dimensions, sizes, strides
    bool view(const int64_t* at) {
        const int64_t* sizes = at + 5;
        Handle base = registers[at[2]].tensor, made;
        if (!base) return raise_no_tensor();
        if (gs_view(base, at[4], sizes, sizes + at[4], at[3], &made))
            return raise(PyExc_MemoryError, "torch could not make a view in a compiled region");
        registers[at[1]].tensor = made;
        return true;
    }

    // address, function, count; of a launch the grid's three, threads and shared bytes; name; a register and an offset
    // in bytes for each buffer
    bool launch(const int64_t* at, const int64_t* buffers, int64_t count, PyObject* name) {
        void** addresses = static_cast<void**>(alloca((2 * count + 2) * sizeof(void*)));
        void** parameters = addresses + count;
        uintptr_t combined = 0;
        for (int64_t index = 0; index < count; ++index) {
            Register& place = registers[buffers[2 * index]];
            if (!place.data) {
                void* data;
                if (!place.tensor || gs_get_data_ptr(place.tensor, &data)) return raise_no_tensor();
                place.data = static_cast<char*>(data);
            }
            addresses[index] = place.data + buffers[2 * index + 1];
            combined |= reinterpret_cast<uintptr_t>(addresses[index]);
        }
        release();
        const Recorded recorded(is_heard, name);
        if (at[0] == RUN) {
            auto loops = reinterpret_cast<int (*)(void**)>(at[1]);
            return !loops(addresses) ||
                   raise(PyExc_IndexError, "index out of range in a compiled gather (embedding, index_select)");
        }
        if (gs_launch_kernel && !(combined & 15) && in_context()) {
            void* nothing = nullptr;
            for (int64_t index = 0; index < count; ++index) parameters[index] = &addresses[index];
            // Two scratch areas that these kernels do not use; a kernel reads as many parameters as it has.
            parameters[count] = parameters[count + 1] = &nothing;
            if (!gs_launch_kernel(reinterpret_cast<void*>(at[1]), at[4], at[5], at[6], at[7], 1, 1, at[8], stream,
                                  parameters, nullptr))
                return true;
        }
        return launch_from_python(constants[at[2]], addresses, count);
    }

    bool in_context() {
        void* context = nullptr;
        if (!has_context) has_context = gs_current_context(&context) == 0 && context;
        return has_context;
    }

    bool launch_from_python(PyObject* function, void** addresses, int64_t count) {
        hold();
        PyObject** arguments = static_cast<PyObject**>(alloca((count + 1) * sizeof(PyObject*)));
        int64_t made = 0;
        PyObject* result = nullptr;
        while (made < count && (arguments[made] = PyLong_FromVoidPtr(addresses[made]))) ++made;
        if (made == count) result = PyObject_Vectorcall(function, arguments, count, nullptr);
        while (made) Py_DecRef(arguments[--made]);
        if (result) Py_DecRef(result);
        return result != nullptr;
    }

    // address, signature, words of this instruction, and with the one after it, counts of arguments and of results, name,
    // a word for each argument, registers of results, lists
    bool operate(const int64_t* at) {
        const int64_t arguments = at[5], results = at[6], *places = at + 8 + arguments;
        Handle made[results + 1];
        memset(made, 0, sizeof made);
        Operands operands = {at, registers, made, nullptr};
        release();
        int status;
        {
            const Recorded recorded(is_heard, constants[at[7]]);
            status = SIGNATURES[at[2]](reinterpret_cast<void*>(at[1]), operands, at + 8);
        }
        for (int64_t index = 0; index < results; ++index) {
            if (!made[index]) continue;
            if (status == 0 && places[index] >= 0)
                registers[places[index]].tensor = made[index];
            else
                gs_delete(made[index]);
        }
        return status == 0;
    }

    // function, names of the keywords or -1, line in the text, count of operands and of results, both; no result is
    // stored, or one, or, if there are several, all but the last word name the items of a sequence (-1: nothing does)
    bool call(const int64_t* at) {
        hold();
        const int64_t operands = at[4], results = at[5];
        PyObject** arguments = static_cast<PyObject**>(alloca((operands + 1) * sizeof(PyObject*)));
        PyObject* result = nullptr;
        int64_t index = 0;
        while (index < operands && (arguments[index] = operand(at[6 + index]))) ++index;
        if (index == operands) {
            PyObject* names = at[2] < 0 ? nullptr : constants[at[2]];
            const intptr_t named = names ? reinterpret_cast<PyTupleObject*>(names)->size : 0;
            result = PyObject_Vectorcall(constants[at[1]], arguments, operands - named, names);
        }
        if (!result || !store(result, at + 6 + operands, results)) {
            if (const char* name = PyUnicode_AsUTF8(filename)) _PyTraceback_Add("run", name, at[3]);
            return false;
        }
        return true;
    }

    // Takes the reference.
    bool store(PyObject* result, const int64_t* places, int64_t count) {
        if (count == 1) {
            set(registers[places[0]], result);
            return true;
        }
        if (count == 0) {
            Py_DecRef(result);
            return true;
        }
        PyObject* several = PySequence_Tuple(result);
        Py_DecRef(result);
        if (!several) return false;
        PyTupleObject* items = reinterpret_cast<PyTupleObject*>(several);
        bool stored = items->size == count - 1;
        if (!stored) PyErr_SetString(PyExc_TypeError, "an operator returned another number of results than was traced");
        for (int64_t index = 0; stored && index < count - 1; ++index) {
            if (places[index] < 0) continue;
            Py_IncRef(items->items[index]);
            set(registers[places[index]], items->items[index]);
        }
        Py_DecRef(several);
        return stored;
    }

    // register, whether a list, count, operands
    bool pack(const int64_t* at) {
        hold();
        PyObject* made = packed(at + 4, at[3], at[2] ? &PyList_Type : &PyTuple_Type);
        if (made) registers[at[1]].object = made;
        return made != nullptr;
    }

    PyObject* packed(const int64_t* operands, int64_t count, PyObject* type) {
        hold();
        const bool is_list = type == &PyList_Type;
        PyObject* made = is_list ? PyList_New(count) : PyTuple_New(count);
        for (int64_t index = 0; made && index < count; ++index) {
            PyObject* item = operand(operands[index]);
            if (!item) {
                Py_DecRef(made);
                return nullptr;
            }
            Py_IncRef(item);
            is_list ? PyList_SetItem(made, index, item) : PyTuple_SetItem(made, index, item);
        }
        return made;
    }
};

// ``self`` is the tuple of the program's words, its constants and the name of its text. The arguments are the list of
// inputs and, where kernels are launched, the stream.
PyObject* run(PyObject* self, PyObject* const* arguments, intptr_t count) {
    Run region(self, count > 1 ? PyLong_AsVoidPtr(arguments[1]) : nullptr);
    return region.read(arguments[0]) ? region.run() : nullptr;
}

// Where the tensors of a list begin, -1 for None.
PyObject* addresses(PyObject*, PyObject* const* arguments, intptr_t) {
    const intptr_t count = PyList_Size(arguments[0]);
    PyObject* result = count < 0 ? nullptr : PyList_New(count);
    for (intptr_t index = 0; result && index < count; ++index) {
        PyObject* item = PyList_GetItem(arguments[0], index);
        void* data = reinterpret_cast<void*>(-1);
        if (item != &_Py_NoneStruct && (!is_tensor(item) || gs_get_data_ptr(handle_in(item), &data))) {
            PyErr_SetString(PyExc_TypeError, "not a tensor that has an address");
            Py_DecRef(result);
            return nullptr;
        }
        PyObject* number = PyLong_FromLongLong(reinterpret_cast<intptr_t>(data));
        if (!number) {
            Py_DecRef(result);
            return nullptr;
        }
        PyList_SetItem(result, index, number);
    }
    return result;
}

}  // namespace

extern "C" {
MethodDefinition gs_addresses = {"addresses", addresses, METH_FASTCALL, nullptr};
MethodDefinition gs_run = {"run", run, METH_FASTCALL, nullptr};
}
