import Cmlx
import Foundation

/// A source of random keys: a key itself, or a state that gives a new one each time.
public protocol RandomStateOrKey {
    func asRandomKey() -> MLXArray
}

extension MLXArray: RandomStateOrKey {
    public func asRandomKey() -> MLXArray { self }
}

public enum MLXRandom {
    /// A sequence of keys.
    public class RandomState: RandomStateOrKey, Updatable, Evaluatable, @unchecked Sendable {
        private var state: MLXArray
        private let lock = NSLock()

        public init() { state = MLXRandom.key(DispatchTime.now().uptimeNanoseconds) }
        public init(seed: UInt64) { state = MLXRandom.key(seed) }

        public func innerState() -> [MLXArray] { lock.withLock { [state] } }

        public func next() -> MLXArray {
            lock.withLock {
                let (kept, given) = MLXRandom.split(key: state)
                // Unevaluated, both would belong to one graph, and perhaps to two threads.
                eval(kept, given)
                state = kept
                return given
            }
        }

        public func seed(_ seed: UInt64) { lock.withLock { state = MLXRandom.key(seed) } }

        public func asRandomKey() -> MLXArray { next() }
    }

    public static let globalState = RandomState()

    public static func seed(_ seed: UInt64) { globalState.seed(seed) }

    public static func key(_ seed: UInt64) -> MLXArray { result { mlx_random_key(&$0, seed) } }

    public static func split(
        key: MLXArray, stream: StreamOrDevice = .default
    ) -> (MLXArray, MLXArray) {
        var second = mlx_array_new()
        let first = result { mlx_random_split(&$0, &second, key.ctx, stream.ctx) }
        return (first, MLXArray(second))
    }

    public static func split(
        key: MLXArray, into num: Int, stream: StreamOrDevice = .default
    ) -> [MLXArray] {
        let keys = result { mlx_random_split_num(&$0, key.ctx, Int32(num), stream.ctx) }
        return keys.map { $0 }
    }

    public static func uniform(
        low: some ScalarOrArray, high: some ScalarOrArray,
        _ shape: (some Collection<Int>)? = [Int]?.none, dtype: DType,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let (low, high) = toArrays(low, high)
        let key = resolve(key: key)
        let shape = shape?.asInt32 ?? low.shape.asInt32
        return result {
            mlx_random_uniform(
                &$0, low.ctx, high.ctx, shape, shape.count, dtype.cmlxDtype, key.ctx, stream.ctx)
        }
    }

    public static func uniform(
        low: some ScalarOrArray, high: some ScalarOrArray,
        _ shape: (some Collection<Int>)? = [Int]?.none,
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        uniform(low: low, high: high, shape, dtype: type.dtype, key: key, stream: stream)
    }

    public static func uniform(
        _ range: Range<Float> = 0 ..< 1, _ shape: some Collection<Int> = [],
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        uniform(
            low: range.lowerBound, high: range.upperBound, shape, dtype: type.dtype, key: key,
            stream: stream)
    }

    public static func normal(
        _ shape: some Collection<Int> = [], dtype: DType, loc: Float = 0, scale: Float = 1,
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return result {
            mlx_random_normal(
                &$0, shape.asInt32, shape.count, dtype.cmlxDtype, loc, scale, key.ctx, stream.ctx)
        }
    }

    public static func normal(
        _ shape: some Collection<Int> = [],
        type: (some HasDType & BinaryFloatingPoint).Type = Float.self, loc: Float = 0,
        scale: Float = 1, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        normal(shape, dtype: type.dtype, loc: loc, scale: scale, key: key, stream: stream)
    }

    public static func randInt<T: HasDType & BinaryInteger>(
        _ range: Range<T>, _ shape: some Collection<Int> = [],
        key: (some RandomStateOrKey)? = MLXArray?.none, stream: StreamOrDevice = .default
    ) -> MLXArray {
        let low = range.lowerBound.asMLXArray(dtype: nil)
        let high = range.upperBound.asMLXArray(dtype: nil)
        let key = resolve(key: key)
        return result {
            mlx_random_randint(
                &$0, low.ctx, high.ctx, shape.asInt32, shape.count, low.dtype.cmlxDtype, key.ctx,
                stream.ctx)
        }
    }

    public static func categorical(
        _ logits: MLXArray, axis: Int = -1, key: (some RandomStateOrKey)? = MLXArray?.none,
        stream: StreamOrDevice = .default
    ) -> MLXArray {
        let key = resolve(key: key)
        return result {
            mlx_random_categorical(&$0, logits.ctx, Int32(axis), key.ctx, stream.ctx)
        }
    }

    @TaskLocal static var taskState: RandomState?
}

/// The given key, or the next one of the task's state or the global one.
public func resolve(key: (some RandomStateOrKey)? = MLXArray?.none) -> MLXArray {
    key?.asRandomKey() ?? (MLXRandom.taskState ?? MLXRandom.globalState).next()
}

public func withRandomState<R>(
    _ state: MLXRandom.RandomState, body: () throws -> R
) rethrows -> R { try MLXRandom.$taskState.withValue(state, operation: body) }
