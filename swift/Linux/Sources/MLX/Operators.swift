import Cmlx

infix operator ** : BitwiseShiftPrecedence
infix operator .&& : LogicalConjunctionPrecedence
infix operator .|| : LogicalDisjunctionPrecedence

extension MLXArray {
    public static func + (a: MLXArray, b: MLXArray) -> MLXArray { add(a, b) }
    public static func + (a: MLXArray, b: some ScalarOrArray) -> MLXArray { add(a, b) }
    public static func + (a: some ScalarOrArray, b: MLXArray) -> MLXArray { add(a, b) }
    public static func += (a: inout MLXArray, b: MLXArray) { a = add(a, b) }
    public static func += (a: inout MLXArray, b: some ScalarOrArray) { a = add(a, b) }

    public static func - (a: MLXArray, b: MLXArray) -> MLXArray { subtract(a, b) }
    public static func - (a: MLXArray, b: some ScalarOrArray) -> MLXArray { subtract(a, b) }
    public static func - (a: some ScalarOrArray, b: MLXArray) -> MLXArray { subtract(a, b) }
    public static func -= (a: inout MLXArray, b: MLXArray) { a = subtract(a, b) }
    public static func -= (a: inout MLXArray, b: some ScalarOrArray) { a = subtract(a, b) }
    public static prefix func - (a: MLXArray) -> MLXArray { negative(a) }

    public static func * (a: MLXArray, b: MLXArray) -> MLXArray { multiply(a, b) }
    public static func * (a: MLXArray, b: some ScalarOrArray) -> MLXArray { multiply(a, b) }
    public static func * (a: some ScalarOrArray, b: MLXArray) -> MLXArray { multiply(a, b) }
    public static func *= (a: inout MLXArray, b: MLXArray) { a = multiply(a, b) }
    public static func *= (a: inout MLXArray, b: some ScalarOrArray) { a = multiply(a, b) }

    public static func / (a: MLXArray, b: MLXArray) -> MLXArray { divide(a, b) }
    public static func / (a: MLXArray, b: some ScalarOrArray) -> MLXArray { divide(a, b) }
    public static func / (a: some ScalarOrArray, b: MLXArray) -> MLXArray { divide(a, b) }
    public static func /= (a: inout MLXArray, b: MLXArray) { a = divide(a, b) }
    public static func /= (a: inout MLXArray, b: some ScalarOrArray) { a = divide(a, b) }

    public static func % (a: MLXArray, b: MLXArray) -> MLXArray { remainder(a, b) }
    public static func % (a: MLXArray, b: some ScalarOrArray) -> MLXArray { remainder(a, b) }
    public static func % (a: some ScalarOrArray, b: MLXArray) -> MLXArray { remainder(a, b) }

    public static func ** (a: MLXArray, b: MLXArray) -> MLXArray { MLX.pow(a, b) }
    public static func ** (a: MLXArray, b: some ScalarOrArray) -> MLXArray { MLX.pow(a, b) }
    public static func ** (a: some ScalarOrArray, b: MLXArray) -> MLXArray { MLX.pow(a, b) }

    public static func .== (a: MLXArray, b: MLXArray) -> MLXArray { equal(a, b) }
    public static func .== (a: MLXArray, b: some ScalarOrArray) -> MLXArray { equal(a, b) }
    public static func .!= (a: MLXArray, b: MLXArray) -> MLXArray { notEqual(a, b) }
    public static func .!= (a: MLXArray, b: some ScalarOrArray) -> MLXArray { notEqual(a, b) }
    public static func .< (a: MLXArray, b: MLXArray) -> MLXArray { less(a, b) }
    public static func .< (a: MLXArray, b: some ScalarOrArray) -> MLXArray { less(a, b) }
    public static func .<= (a: MLXArray, b: MLXArray) -> MLXArray { lessEqual(a, b) }
    public static func .<= (a: MLXArray, b: some ScalarOrArray) -> MLXArray { lessEqual(a, b) }
    public static func .> (a: MLXArray, b: MLXArray) -> MLXArray { greater(a, b) }
    public static func .> (a: MLXArray, b: some ScalarOrArray) -> MLXArray { greater(a, b) }
    public static func .>= (a: MLXArray, b: MLXArray) -> MLXArray { greaterEqual(a, b) }
    public static func .>= (a: MLXArray, b: some ScalarOrArray) -> MLXArray { greaterEqual(a, b) }

    public static func .&& (a: MLXArray, b: MLXArray) -> MLXArray { logicalAnd(a, b) }
    public static func .|| (a: MLXArray, b: MLXArray) -> MLXArray { logicalOr(a, b) }
    public static prefix func .! (a: MLXArray) -> MLXArray { logicalNot(a) }
    public static prefix func ~ (a: MLXArray) -> MLXArray { bitwiseInvert(a) }

    public static func & (a: MLXArray, b: MLXArray) -> MLXArray { bitwiseAnd(a, b) }
    public static func & (a: MLXArray, b: some ScalarOrArray) -> MLXArray { bitwiseAnd(a, b) }
    public static func | (a: MLXArray, b: MLXArray) -> MLXArray { bitwiseOr(a, b) }
    public static func | (a: MLXArray, b: some ScalarOrArray) -> MLXArray { bitwiseOr(a, b) }
    public static func ^ (a: MLXArray, b: MLXArray) -> MLXArray { bitwiseXOr(a, b) }
    public static func ^ (a: MLXArray, b: some ScalarOrArray) -> MLXArray { bitwiseXOr(a, b) }
    public static func << (a: MLXArray, b: MLXArray) -> MLXArray { leftShift(a, b) }
    public static func << (a: MLXArray, b: some ScalarOrArray) -> MLXArray { leftShift(a, b) }
    public static func >> (a: MLXArray, b: MLXArray) -> MLXArray { rightShift(a, b) }
    public static func >> (a: MLXArray, b: some ScalarOrArray) -> MLXArray { rightShift(a, b) }
}
