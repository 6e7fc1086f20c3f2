from compile_core.lowering.codegen_cpp import generate_cpp as generate
