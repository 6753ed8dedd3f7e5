"""FlashAttention-4 without its compiler: its Python, and the kernels that fa4_ahead.py compiled beside this file."""

import hashlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types

KERNELS = pathlib.Path(__file__).resolve().parent / "kernels"


def canonical(x):
    """A key's text, the same whether CuTe's types are there or stand-ins of their names."""
    if isinstance(x, (tuple, list)):
        return f"({','.join(map(canonical, x))})"
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    name = getattr(x, "__name__", None)
    return f"T{name}" if name else f"{type(x).__name__}:{x}"


def name_of(key):
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:16]


class Named(type):
    """The type of a stand-in for what a module of the compiler has: any attribute is another one, and a decorator changes nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name, (StandIn,), {})

    def __call__(cls, *args, **how):
        of_one = len(args) == 1 and not how and (callable(args[0]) or isinstance(args[0], (int, float)))
        return args[0] if of_one else cls

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __truediv__ = __or__

    def __neg__(cls):
        return cls

    def __iter__(cls):
        return iter(())

    def __index__(cls):
        return 1

    __int__ = __index__

    def __hash__(cls):
        return hash(cls.__name__)

    def __eq__(cls, other):
        return cls is other or getattr(other, "__name__", None) == cls.__name__

    def __instancecheck__(cls, x):
        return False


class StandIn(metaclass=Named):
    def __init_subclass__(cls, **how):
        pass


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Named(name, (StandIn,), {}))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a stand-in of each module of these packages."""

    def __init__(self, *packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


class Cache:
    """A cache of FlashAttention-4's that has what was compiled, and no more."""

    def __init__(self, name=None):
        self.name, self.found = name, {}

    def path(self, key):
        return KERNELS / f"{self.name}-{name_of(key)}.so"

    def __contains__(self, key):
        if not self.path(key).exists():
            raise NotImplementedError(f"fa4_ahead.py compiled no kernel of {self.name} for {key}")
        return True

    def __getitem__(self, key):
        if key not in self.found:
            import tvm_ffi

            self.found[key] = tvm_ffi.load_module(str(self.path(key))).func
        return self.found[key]


def install():
    """To be called before flash_attn.cute is imported."""
    packages = ["cutlass", "quack"]
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        packages.append("cuda")
    sys.meta_path.insert(0, Finder(*packages))
    caches = types.ModuleType("flash_attn.cute.cache_utils")
    caches.get_jit_cache = caches.JITCache = Cache
    sys.modules[caches.__name__] = caches
