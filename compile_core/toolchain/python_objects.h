// What C++ files built by torch_library.py need of CPython and of torch's tensors. They include no header of either, since a
// user's machine may lack them and torch's take long to compile.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

struct PyObject {
    intptr_t references;
    PyObject* type;
};
struct PyTupleObject {
    PyObject head;
    intptr_t size;
    PyObject* items[1];
};
typedef PyObject* (*FastFunction)(PyObject*, PyObject* const*, intptr_t);
struct MethodDefinition {
    const char* name;
    FastFunction function;
    int flags;
    const char* documentation;
};

extern PyObject PyDict_Type, PyList_Type, PyTuple_Type, _Py_NoneStruct;
extern PyObject *PyExc_Exception, *PyExc_IndexError, *PyExc_MemoryError, *PyExc_TypeError;
void Py_DecRef(PyObject*);
void Py_IncRef(PyObject*);
char* PyBytes_AsString(PyObject*);
int PyDict_Contains(PyObject*, PyObject*);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject*);
int PyDict_Next(PyObject*, intptr_t*, PyObject**, PyObject**);
intptr_t PyDict_Size(PyObject*);
void PyErr_Clear(void);
int PyErr_ExceptionMatches(PyObject*);
PyObject* PyErr_Occurred(void);
PyObject* PyErr_NoMemory(void);
void PyErr_SetString(PyObject*, const char*);
void PyEval_RestoreThread(void*);
void* PyEval_SaveThread(void);
PyObject* PyList_GetItem(PyObject*, intptr_t);
PyObject* PyList_New(intptr_t);
int PyList_SetItem(PyObject*, intptr_t, PyObject*);
int PyList_SetSlice(PyObject*, intptr_t, intptr_t, PyObject*);
intptr_t PyList_Size(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromVoidPtr(void*);
void* PyMem_RawCalloc(size_t, size_t);
void PyMem_RawFree(void*);
PyObject* PyObject_GenericGetDict(PyObject*, void*);
PyObject* PyObject_GetAttr(PyObject*, PyObject*);
PyObject* PyObject_GetItem(PyObject*, PyObject*);
int PyObject_IsTrue(PyObject*);
int PyObject_RichCompareBool(PyObject*, PyObject*, int);
intptr_t PyObject_Size(PyObject*);
PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
int PySequence_Contains(PyObject*, PyObject*);
PyObject* PySequence_Tuple(PyObject*);
void _PyTraceback_Add(const char*, const char*, int);
PyObject* PyTuple_New(intptr_t);
int PyTuple_SetItem(PyObject*, intptr_t, PyObject*);
int PyType_IsSubtype(PyObject*, PyObject*);
char* PyUnicode_AsUTF8(PyObject*);

// A tensor's handle is the address of a pointer to its implementation.
struct AtenTensorOpaque;
typedef AtenTensorOpaque* Handle;

// Filled in by the loader: where in its Python object torch keeps that pointer, and a function of torch's.
int64_t gs_implementation_offset;
int (*gs_get_data_ptr)(Handle, void**);
}

constexpr int METH_FASTCALL = 0x80;

inline Handle handle_in(PyObject* tensor) {
    return reinterpret_cast<Handle>(reinterpret_cast<char*>(tensor) + gs_implementation_offset);
}
