"""NumPy's functions, methods and operators in captured code: values, shapes and types of elements as NumPy gives them.

What its stand-in does otherwise ends the graph, so that NumPy itself computes it.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import gradsplit
from tests.capture.same_as_plain import assert_same

EXPRESSIONS = """
np.sum(X[:, :, None] * Y[:, None, :], axis=(-2, -1))
X+Y
X*2
2*X
X@Y.T
X/Y
X//0.3
X%0.7
X**2
-X
abs(X)
X>Y
X==X
~B
B&(Y>0)
I+1
I*2.5
I/2
I//2
I%3
I**2
F+1
F*2.0
F+X
F+I
I+B
B+B
B*X
F+np.float32(3)
F+np.float64(3)
I+np.int64(3)
np.float32(3)
np.sin(X)
np.sin(I)
np.exp(F)
np.sqrt(abs(X))
np.log(abs(X))
np.add(X,Y)
np.multiply(I,F)
np.maximum(X,0)
np.where(B,X,0)
np.where(B,1,0)
np.sum(I,axis=0)
np.sum(B)
np.sum(F)
np.sum(F,dtype=np.float64)
np.prod(I,axis=1)
np.mean(X,axis=0,keepdims=True)
np.mean(I)
np.mean(F)
np.std(X,axis=1)
np.var(F)
np.std(X,ddof=1)
np.max(X)
np.min(I,axis=0)
np.argmax(X,axis=1)
np.argmin(X)
np.cumsum(I,axis=0)
np.cumsum(X)
np.any(B)
np.all(B,axis=1)
np.clip(X,-1,1)
np.round(X,2)
np.floor(X)
np.sign(I)
np.concatenate([X,Y],axis=1)
np.concatenate((X,I))
np.stack([X,Y])
np.vstack([X,Y])
np.hstack([X,Y])
np.split(X,2)
np.array_split(X,3,axis=1)
np.reshape(X,(2,10))
X.reshape(-1)
X.reshape(10,2)
X.T
X.transpose(1,0)
np.transpose(X)
np.swapaxes(X,0,1)
np.expand_dims(X,0)
np.squeeze(X[None])
X.ravel()
X.flatten()
X.astype(np.float32)
X.astype("int64")
X.astype(int)
I.astype(float)
X.sum()
X.mean(0)
X.max(axis=1)
X.argmax()
X.copy()
X.dot(Y.T)
np.dot(X,Y.T)
np.outer(X[0],Y[0])
np.inner(X,Y)
np.tensordot(X,Y,axes=([1],[1]))
np.einsum("ij,kj->ik",X,Y)
np.matmul(X,Y.T)
np.linalg.norm(X)
np.linalg.norm(X,axis=1)
np.linalg.inv(X[:4,:4])
np.linalg.det(X[:4,:4])
np.linalg.solve(X[:4,:4],Y[:4,0])
np.linalg.eigvalsh(X[:4,:4]+X[:4,:4].T)
np.linalg.svd(X,compute_uv=False)
np.fft.fft(X)
np.fft.ifft(Z)
np.fft.rfft(X)
np.fft.fft2(X)
np.zeros((2,3))
np.zeros(3,dtype=np.int32)
np.ones_like(X)
np.zeros_like(I)
np.full((2,),3)
np.full((2,),3.5)
np.eye(3)
np.arange(5)
np.arange(1,2,0.25)
np.linspace(0,1,5)
np.logspace(0,2,3)
np.identity(2)
np.array([1,2,3])
np.array([1.0,2])
np.array([[1,2],[3,4]],dtype=np.float32)
np.array([True,False])
np.asarray(X)
np.array(X)
np.tril(X)
np.triu(X,1)
np.diag(X[:,0])
np.diag(X)
np.trace(X)
np.flip(X,0)
np.fliplr(X)
X[::-1]
X[:, ::2]
X[1]
X[1,2]
X[...,None]
X[[0,2]]
X[np.array([0,2])]
X[I[:,0]%4]
X[:, [1,2]]
np.roll(X,1,axis=0)
np.repeat(X,2,axis=0)
np.tile(X,(2,1))
np.take(X,[0,1],axis=1)
np.sort(X,axis=1)
np.argsort(X,axis=1)
np.diff(X)
np.median(X,axis=0)
np.percentile(X,30,axis=0)
np.quantile(X,0.3)
np.average(X,axis=0,weights=np.array([1.,2,3,4]))
np.cov(X)
np.corrcoef(X)
np.histogram(X,bins=4)
np.searchsorted(np.sort(X[0]),X[1])
np.interp(X[0],Y[0],Y[1])
np.meshgrid(X[0],X[1])
np.meshgrid(X[0],X[1],indexing="ij")
np.isnan(X)
np.isclose(X,Y)
np.allclose(X,X)
np.real(Z)
np.imag(Z)
np.abs(Z)
np.angle(Z)
np.conj(Z)
Z*2
Z.real
Z@Z.T
np.nan_to_num(X)
np.power(I,2)
np.power(X,2.0)
np.arctan2(X,Y)
np.hypot(X,Y)
np.mod(X,0.3)
np.fmod(X,0.3)
np.divmod(X,0.3)
np.modf(X)
np.square(I)
np.cbrt(X)
np.exp2(I)
np.logaddexp(X,Y)
np.minimum(I,X)
np.fmax(X,Y)
np.logical_and(B,I)
np.logical_not(I)
np.bitwise_and(I,3)
np.left_shift(I,1)
np.gcd(I,4)
np.count_nonzero(B)
np.ptp(X,axis=0)
np.cross(X[:,:3],Y[:,:3])
np.kron(X[:2,:2],Y[:2,:2])
np.convolve(X[0],Y[0])
np.pad(X,1)
np.moveaxis(X[None],0,-1)
np.rollaxis(X,1)
np.rot90(X)
np.atleast_2d(X[0])
np.broadcast_to(X[0],(3,5))
np.shape(X)
np.ndim(X)
X.shape[0]
X.size
X.dtype
X.ndim
X.strides
X.dtype.name
X.dtype==np.float64
len(X)
np.pi*X
np.heaviside(X,0.5)
np.copysign(X,Y)
np.sinc(X)
np.i0(X)
np.unwrap(X)
np.gradient(X)
np.vander(X[0])
np.column_stack([X,Y])
np.dstack([X,Y])
np.append(X,Y)
np.delete(X,0,axis=0)
np.insert(X,0,1,axis=0)
np.nonzero(X)
np.unique(I)
X[B]
np.nanmean(X)
np.nansum(X)
np.add.reduce(X)
I>>1
X.clip(0,1)
X.std()
X.var(0)
X.cumsum()
X.all()
X.any(1)
X.min()
X.prod(0)
X.swapaxes(0,1)
X.squeeze()
X.trace()
X.diagonal()
X.repeat(2)
X.round(1)
X.nonzero()
X.conj()
X.argsort()
X.take([0,1])
np.float64(2)*F
F.mean()
F.std()
F.sum(axis=0)
F.astype(np.float16).sum()
np.int8(3)+np.int8(4)
I.astype(np.int8).sum()
I.astype(np.uint8)+I.astype(np.int8)
np.true_divide(I,I+1)
np.sqrt(I)
np.float_power(I,2)
F**2
F**0.5
I**0.5
2**I
2.0**I
np.exp(I.astype(np.int8))
np.mean(F.astype(np.float16))
np.max(B)
np.sum(X,where=B)
np.dot(X[0],Y[0])
np.vdot(Z,Z)
np.round(I.astype(float)/2)
np.var(Z)
np.mean(Z)
np.linspace(0,10,4,dtype=int)
np.arange(3.0)
np.arange(3,dtype=np.float32)
np.full_like(I,2.5)
np.reciprocal(I+1)
np.negative(I)
np.positive(X)
np.rint(X)
np.trunc(X)
np.signbit(X)
np.nextafter(X,Y)
np.ldexp(X,I)
np.tri(3)
X.dtype in (np.float32, np.float64)
np.float64==X.dtype
np.dtype("f4")==F.dtype
abs(I)
I[:,None]/I[0]
np.indices((2,2))
np.vsplit(X,2)
np.hsplit(X,[2])
np.argwhere(X>0)
np.flatnonzero(X>0)
np.min([1,2,3])
np.sum([1,2,3])
np.array([X[0],Y[0]])
np.array([1,2.5])+I[0,:2]
"""


def arrays():
    random = np.random.default_rng(0)
    x, y = random.standard_normal((4, 5)), random.standard_normal((4, 5))
    integers = random.integers(0, 5, (4, 5)).astype(np.int32)
    return x, y, integers, x.astype(np.float32), x > 0, x + 1j * y


def as_arrays(value):
    """The stand-in has arrays without dims for NumPy's scalars."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, (list, tuple)):
        return [as_arrays(item) for item in value]
    return value


@pytest.mark.parametrize("expression", EXPRESSIONS.strip().splitlines())
def test_same_as_numpy(expression):
    namespace = {"np": np}
    exec(f"def program(X, Y, I, F, B, Z):\n    return {expression}", namespace)
    program = namespace["program"]
    compiled = gradsplit.compile(program, backend="eager")
    given = arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's own, of divisions by zero
        expected, found = program(*given), compiled(*given)
    assert_same(as_arrays(expected), as_arrays(found), expression)
    assert_same(arrays(), given, "arguments")
