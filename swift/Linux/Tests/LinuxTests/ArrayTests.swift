import Foundation
import MLX
import Testing

/// The stand-ins' arithmetic against plain loops over Swift arrays.
@Suite struct ArrayTests {
    let x = MLXArray(0 ..< 24, [2, 3, 4]).asType(.float32)

    /// What one expects of `x` at a position.
    func at(_ i: Int, _ j: Int, _ k: Int) -> Float { Float(12 * i + 4 * j + k) }

    func values(_ shape: [Int], _ value: ([Int]) -> Float) -> [Float] {
        var index = shape.map { _ in 0 }
        return (0 ..< shape.reduce(1, *)).map { flat in
            var rest = flat
            for axis in shape.indices.reversed() {
                index[axis] = rest % shape[axis]
                rest /= shape[axis]
            }
            return value(index)
        }
    }

    func expect(
        _ array: MLXArray, _ shape: [Int], _ value: ([Int]) -> Float,
        _ location: SourceLocation = #_sourceLocation
    ) {
        #expect(array.shape == shape, sourceLocation: location)
        let errors = zip(array.asArray(Float.self), values(shape, value)).map { abs($0 - $1) }
        #expect(errors.allSatisfy { $0 < 1e-5 }, sourceLocation: location)
    }

    @Test func scalarsTakeTheArraysType() {
        let half = MLXArray([1, 2] as [Float]).asType(.float16)
        #expect((half * 2.5).dtype == .float16)
        #expect((2 + half).dtype == .float16)
        #expect((MLXArray([1, 2]) * 2).dtype == .int32)
        #expect((MLXArray([1, 2]) * 2.5).dtype == .float32)
        #expect((MLXArray(true) + 1).dtype == .int32)
        #expect(MLXArray(1.5).dtype == .float32)
        #expect(MLXArray([1, 2]).dtype == .int32)
        #expect(MLXArray(UInt32(7)).dtype == .uint32)
    }

    @Test func operators() {
        expect(x + 1, [2, 3, 4]) { at($0[0], $0[1], $0[2]) + 1 }
        expect(2 - x, [2, 3, 4]) { 2 - at($0[0], $0[1], $0[2]) }
        expect(x * x, [2, 3, 4]) { at($0[0], $0[1], $0[2]) * at($0[0], $0[1], $0[2]) }
        expect(1 / (x + 1), [2, 3, 4]) { 1 / (at($0[0], $0[1], $0[2]) + 1) }
        expect(-x, [2, 3, 4]) { -at($0[0], $0[1], $0[2]) }
        expect(x ** 2, [2, 3, 4]) { at($0[0], $0[1], $0[2]) * at($0[0], $0[1], $0[2]) }
        expect((x % 5), [2, 3, 4]) { at($0[0], $0[1], $0[2]).truncatingRemainder(dividingBy: 5) }
        expect((x .> 5) .&& (x .<= 9), [2, 3, 4]) {
            at($0[0], $0[1], $0[2]) > 5 && at($0[0], $0[1], $0[2]) <= 9 ? 1 : 0
        }
        expect(MLX.where(x .< 3, x, -1.0), [2, 3, 4]) {
            at($0[0], $0[1], $0[2]) < 3 ? at($0[0], $0[1], $0[2]) : -1
        }
    }

    @Test func slices() {
        expect(x[1], [3, 4]) { at(1, $0[0], $0[1]) }
        expect(x[-1, 0], [4]) { at(1, 0, $0[0]) }
        expect(x[0..., 1 ..< 3], [2, 2, 4]) { at($0[0], $0[1] + 1, $0[2]) }
        expect(x[.ellipsis, -2], [2, 3]) { at($0[0], $0[1], 2) }
        expect(x[.ellipsis, ..<2], [2, 3, 2]) { at($0[0], $0[1], $0[2]) }
        expect(x[0, .ellipsis, 1...], [3, 3]) { at(0, $0[0], $0[1] + 1) }
        expect(x[0..., .newAxis, 2], [2, 1, 4]) { at($0[0], 2, $0[2]) }
        expect(x[.newAxis, .ellipsis, .newAxis], [1, 2, 3, 4, 1]) { at($0[1], $0[2], $0[3]) }
        expect(x[.ellipsis, .stride(by: 2)], [2, 3, 2]) { at($0[0], $0[1], 2 * $0[2]) }
        expect(x[0..., .stride(by: -1)], [2, 3, 4]) { at($0[0], 2 - $0[1], $0[2]) }
        expect(x[.ellipsis, .stride(from: 1, to: 4, by: 2)], [2, 3, 2]) {
            at($0[0], $0[1], 1 + 2 * $0[2])
        }
        expect(x[0..., (-2)...], [2, 2, 4]) { at($0[0], $0[1] + 1, $0[2]) }
    }

    @Test func arraysAsIndices() {
        let rows = MLXArray([2, 0])
        let grid = MLXArray([0, 1, 2, 2], [2, 2])
        let (r, g) = ([2, 0], [[0, 1], [2, 2]])
        expect(x[0..., rows], [2, 2, 4]) { at($0[0], r[$0[1]], $0[2]) }
        expect(x[0..., grid, 1...], [2, 2, 2, 3]) { at($0[0], g[$0[1]][$0[2]], $0[3] + 1) }
        expect(x[MLXArray([1, 0]), rows], [2, 4]) { at([1, 0][$0[0]], r[$0[0]], $0[1]) }
        // A number beside an array is an index like it; separated, their axes go first.
        expect(x[1, 0..., rows], [2, 3]) { at(1, $0[1], r[$0[0]]) }
        expect(x[0..., 1, rows], [2, 2]) { at($0[0], 1, r[$0[1]]) }
        expect(x[0..., .newAxis, rows], [2, 1, 2, 4]) { at($0[0], r[$0[2]], $0[3]) }
    }

    @Test func writing() {
        func changed(
            _ value: Float, where isChanged: ([Int]) -> Bool, _ write: (inout MLXArray) -> Void,
            _ location: SourceLocation = #_sourceLocation
        ) {
            var y = x + 0
            write(&y)
            expect(y, [2, 3, 4], { isChanged($0) ? value : at($0[0], $0[1], $0[2]) }, location)
        }
        let seven = MLXArray(7 as Float)
        changed(7, where: { $0[0] == 1 }) { $0[1] = seven }
        changed(7, where: { $0[1] == 1 && $0[2] >= 2 }) { $0[0..., 1, 2...] = seven }
        changed(7, where: { $0[2] == 3 }) {
            $0[.ellipsis, -1] = MLXArray.full([2, 3], values: seven)
        }
        changed(7, where: { $0[2] % 2 == 1 }) { $0[.ellipsis, .stride(from: 1, by: 2)] = seven }
        changed(7, where: { $0[1] != 1 }) { $0[0..., MLXArray([2, 0])] = seven }
        changed(7, where: { $0[0] == 0 && $0[2] != 1 && $0[2] != 2 }) {
            $0[0, 0..., MLXArray([3, 0])] = seven
        }
        // A row of values each, in the order of the indices.
        let y = x + 0
        y[0..., MLXArray([2, 0])] = MLXArray([10, 20] as [Float], [2, 1])
        expect(y, [2, 3, 4]) { $0[1] == 2 ? 10 : $0[1] == 0 ? 20 : at($0[0], 1, $0[2]) }
        // Another holder of the array keeps the old values.
        let z = x + 0
        let w = z + 0
        w[0] = seven
        expect(z, [2, 3, 4]) { at($0[0], $0[1], $0[2]) }
    }

    @Test func reductions() {
        expect(x.sum(axis: 1), [2, 4]) { i in (0 ..< 3).map { at(i[0], $0, i[1]) }.reduce(0, +) }
        expect(x.max(axes: [0, 2], keepDims: true), [1, 3, 1]) { at(1, $0[1], 3) }
        expect(x.mean(axis: -1), [2, 3]) { at($0[0], $0[1], 0) + 1.5 }
        #expect(x.sum().item(Float.self) == 276)
        #expect(x.argMax().item(Int.self) == 23)
        #expect((x .>= 0).all().item(Bool.self))
        expect(logSumExp(x, axis: 2), [2, 3]) { i in
            let row = (0 ..< 4).map { at(i[0], i[1], $0) }
            return row.max()! + log(row.map { exp($0 - row.max()!) }.reduce(0, +))
        }
        #expect(
            allClose(softmax(x, axis: -1).sum(axis: -1), MLXArray.ones([2, 3])).item(Bool.self))
        expect(cumsum(x, axis: 1), [2, 3, 4]) { i in
            (0 ... i[1]).map { at(i[0], $0, i[2]) }.reduce(0, +)
        }
        #expect(abs(variance(x[0, 0]).item(Float.self) - 1.25) < 1e-6)
    }

    @Test func sortingAndTaking() {
        let y = MLXArray([3, 1, 2, 9, 7, 8] as [Float], [2, 3])
        #expect(argSort(y, axis: -1).asArray(Int.self) == [1, 2, 0, 1, 2, 0])
        #expect(sorted(y, axis: -1).asArray(Float.self) == [1, 2, 3, 7, 8, 9])
        #expect(argPartition(y, kth: 0, axis: -1)[0..., 0].asArray(Int.self) == [1, 1])
        let order = argSort(y, axis: -1)
        #expect(takeAlong(y, order, axis: -1).asArray(Float.self) == [1, 2, 3, 7, 8, 9])
        let put = putAlong(
            y, MLXArray([2, 0], [2, 1]), values: MLXArray([-1 as Float], [1, 1]), axis: 1)
        #expect(put.asArray(Float.self) == [3, 1, -1, -1, 7, 8])
        #expect(y.take(MLXArray([1, 0]), axis: 0).asArray(Float.self) == [9, 7, 8, 3, 1, 2])
    }

    @Test func shapes() {
        expect(x.transposed(2, 0, 1), [4, 2, 3]) { at($0[1], $0[2], $0[0]) }
        expect(x.swappedAxes(1, 2), [2, 4, 3]) { at($0[0], $0[2], $0[1]) }
        expect(x.reshaped(6, -1), [6, 4]) { Float(4 * $0[0] + $0[1]) }
        expect(concatenated([x, x], axis: 1), [2, 6, 4]) { at($0[0], $0[1] % 3, $0[2]) }
        expect(stacked([x, x + 1], axis: 1), [2, 2, 3, 4]) {
            at($0[0], $0[2], $0[3]) + Float($0[1])
        }
        expect(expandedDimensions(x, axes: [0, 3]), [1, 2, 3, 1, 4]) { at($0[1], $0[2], $0[4]) }
        expect(broadcast(x[0..., ..<1], to: [2, 3, 4]), [2, 3, 4]) { at($0[0], 0, $0[2]) }
        expect(repeated(x, count: 2, axis: 0), [4, 3, 4]) { at($0[0] / 2, $0[1], $0[2]) }
        expect(padded(x, widths: [0, .init((1, 0)), 0]), [2, 4, 4]) {
            $0[1] == 0 ? 0 : at($0[0], $0[1] - 1, $0[2])
        }
        #expect(x.split(parts: 3, axis: 1).map(\.shape) == Array(repeating: [2, 1, 4], count: 3))
        #expect(x.flattened().asArray(Float.self) == (0 ..< 24).map { Float($0) })
    }

    @Test func matrices() {
        let (a, b) = (x[0], x[1].T)
        expect(a.matmul(b), [3, 3]) { i in
            (0 ..< 4).map { at(0, i[0], $0) * at(1, i[1], $0) }.reduce(0, +)
        }
        expect(einsum("ij,kj->ik", x[0], x[1]), [3, 3]) { i in
            (0 ..< 4).map { at(0, i[0], $0) * at(1, i[1], $0) }.reduce(0, +)
        }
        expect(tril(MLXArray.ones([3, 3])), [3, 3]) { $0[0] >= $0[1] ? 1 : 0 }
    }

    @Test func typesAndBytes() {
        #expect(MLXArray(1.0 as Float).view(dtype: .uint32).item(UInt32.self) == 0x3F80_0000)
        let half = x.asType(.float16)
        #expect(half.nbytes == 48 && half.itemSize == 2)
        #expect(half.transposed().asArray(Float.self) == x.transposed().asArray(Float.self))
        let data = x.T.asData(access: .copy)
        #expect(data.shape == [4, 3, 2] && data.strides == [6, 2, 1])
        #expect(
            MLXArray(data.data, data.shape, dtype: data.dType).asArray(Float.self)
                == x.T.asArray(Float.self))
        #expect(x.T.asData(access: .noCopy).strides == [1, 4, 12])
        for type in DType.allCases where type != .complex64 {
            #expect(MLXArray([1, 0]).asType(type).asArray(Int.self) == [1, 0])
            #expect(MLXArray.zeros([3], dtype: type).dtype == type)
        }
    }
}
