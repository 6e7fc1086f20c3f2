"""The compiler: capture, autograd, lowering, runtime and backends; ``gradsplit`` has its public names."""

if __name__ == "compile_core":
    from gradsplit.give_way import give_way

    give_way(__name__)
