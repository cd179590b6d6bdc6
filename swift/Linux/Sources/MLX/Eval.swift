import Cmlx

public func eval(_ arrays: MLXArray...) { eval(arrays) }

public func eval(_ arrays: some Collection<MLXArray>) { withVector(arrays) { _ = mlx_eval($0) } }

/// Evaluates all arrays found in the values: arrays, what holds arrays, and collections of them.
public func eval(_ values: Any...) { eval(arrays(in: values)) }

public func eval(_ values: some Sequence<Any>) { eval(arrays(in: Array(values))) }

public func asyncEval(_ arrays: some Collection<MLXArray>) {
    withVector(arrays) { _ = mlx_async_eval($0) }
}

public func asyncEval(_ values: Any...) { asyncEval(arrays(in: values)) }

public func asyncEval(_ values: some Sequence<Any>) { asyncEval(arrays(in: Array(values))) }

public func checkedEval(_ values: Any...) throws { try withError { eval(arrays(in: values)) } }

private func arrays(in value: Any) -> [MLXArray] {
    switch value {
    case let value as Evaluatable: value.innerState()
    case let values as [Any]: values.flatMap { arrays(in: $0) }
    case let values as [AnyHashable: Any]: values.values.flatMap { arrays(in: $0) }
    case let (a, b) as (Any, Any): arrays(in: a) + arrays(in: b)
    case let (a, b, c) as (Any, Any, Any): arrays(in: a) + arrays(in: b) + arrays(in: c)
    case is String, is any BinaryInteger, is any BinaryFloatingPoint: []
    default: fatalError("no arrays to be found in \(value)")
    }
}
