import Foundation
import MLX

/// What a calibration by the very policy measured of a model's heads, beyond one curve each: profiles
/// of version 2 have it.
struct MeasuredHeads: Sendable, Equatable {
    /// Where the remainder saturated in what was tried; 0 is the first order.
    let orders: [Float]
    /// Where spans of positions end, ascending; the last is the text's length.
    let spans: [Int]
    /// Mean error of each head, order, span and number of slots, `[heads, orders, spans, grid]` row by
    /// row, the model's layers one after the other.
    private let errors: [Float]
    private let heads: Int, points: Int
    /// By bits, each head's error when all its rows are packed in the frame.
    let packing: [Int: [Double]]
    /// Each head's error where a stretch of text comes again whose first coming it does not hold; nil
    /// where that was not measured.
    var echoes: [Double]?
    /// Elements of those that shared a scale.
    let groupSize: Int
    /// Of the policy that ran.
    let policy: String
    /// Frames of each layer, by context: positions from 0 to below it.
    let frames: [Int: [H2OFrame]]

    // Of one array in a file.
    private static let mostNumbers = 1 << 26

    /// - Parameters:
    ///   - json: "measured" of a profile.
    ///   - model: Whose heads these are.
    ///   - grid: Of the profile.
    /// - Throws: ``H2OError/profile(_:)`` unless all is of such a model.
    init(_ json: H2OSettingValue, of model: ModelIdentity, grid: Int) throws {
        guard let orders = json["orders"]?.array?.map(\.double), !orders.isEmpty,
            orders.allSatisfy({ ($0 ?? -1) >= 0 && $0!.isFinite }),
            let spans = json["spans"]?.array?.map(\.int), !spans.isEmpty,
            zip([0] + spans, spans).allSatisfy({ ($0 ?? 0) < ($1 ?? 0) }),
            let frames = json["frames"]?.object, let policy = json["policy"]?.object
        else { throw Self.damage("its orders, spans, frames or policy are missing or wrong") }
        self.orders = orders.map { Float($0!) }
        // Version 2 always names it; a calibration by something else would have no orders.
        self.policy = policy["name"]?.string ?? ""
        let heads = model.kvHeads.reduce(0, +)
        let shape = [heads, orders.count, spans.count, grid]
        (self.heads, points, self.spans) = (heads, grid, spans.map { $0! })
        errors = try Self.losses(json["errors"], shape)
        packing = try (json["packing"]?.object ?? [:]).reduce(into: [:]) { all, entry in
            guard let bits = Int(entry.key) else { throw Self.damage("\(entry.key) bits") }
            all[bits] = try Self.losses(entry.value, [heads]).map(Double.init)
        }
        echoes = try json["echoes"].map { try Self.losses($0, [heads]).map(Double.init) }
        groupSize = json["group_size"]?.int ?? H2OPacking.dense.groupSize
        self.frames = try frames.reduce(into: [:]) { all, entry in
            guard let context = Int(entry.key), context > 0, let layers = entry.value.array,
                layers.count == model.kvHeads.count
            else { throw Self.damage("frames for \(entry.key) tokens") }
            all[context] = try layers.enumerated().map { layer, numbers in
                try Self.frame(numbers, model.kvHeads[layer], model.keyWidths[layer])
            }
        }
    }

    private static func damage(_ what: String) -> H2OError {
        .profile("The profile is damaged: \(what).")
    }

    /// Numbers that are at least 0.
    private static func losses(_ json: H2OSettingValue?, _ shape: [Int]) throws -> [Float] {
        let numbers = try numbers(json, shape)
        guard numbers.allSatisfy({ $0 >= 0 }) else { throw damage("losses below 0") }
        return numbers
    }

    /// Mean errors `[heads, orders, grid]` over the positions before the end of a span: of the first one
    /// that ends at `length` or after it, or of the last.
    func errors(upTo length: Int) -> [[[Double]]] {
        let last = spans.firstIndex { $0 >= length } ?? spans.count - 1
        let lengths = zip([0] + spans, spans[...last]).map { Double($1 - $0) }
        return (0 ..< heads).map { head in
            orders.indices.map { order in
                (0 ..< points).map { point in
                    let sum = lengths.indices.reduce(0.0) { sum, span in
                        let row = (head * orders.count + order) * spans.count + span
                        return sum + lengths[span] * Double(errors[row * points + point])
                    }
                    return sum / Double(spans[last])
                }
            }
        }
    }

    /// Each head's better order at each number of slots, over the same positions.
    func curves(upTo length: Int) -> [[Double]] {
        errors(upTo: length).map { orders in
            let best = (0 ..< points).map { point in orders.map { $0[point] }.min()! }
            // As exactly as the profile's own curves are written.
            return falling(best.map { Double(String(format: "%.4g", $0))! })
        }
    }

    /// A layer's frame from its centre and scale `[2, H, D]`.
    private static func frame(_ json: H2OSettingValue, _ heads: Int, _ width: Int) throws
        -> H2OFrame
    {
        let numbers = try numbers(json, [2, heads, width])
        let rows = (0 ..< 2 * heads).map { Array(numbers[$0 * width ..< ($0 + 1) * width]) }
        do {
            return try H2OFrame(centre: Array(rows[..<heads]), scale: Array(rows[heads...]))
        } catch {
            throw damage(error.localizedDescription)
        }
    }

    /// An array of finite numbers: base64 of their bytes, little-endian, float16 or float32.
    private static func numbers(_ json: H2OSettingValue?, _ shape: [Int]) throws -> [Float] {
        let dtypes: [String: DType] = ["float16": .float16, "float32": .float32]
        let count = shape.reduce(1, *)
        guard let json, json["shape"]?.array?.map(\.int) == shape, count <= mostNumbers,
            let dtype = json["dtype"]?.string.flatMap({ dtypes[$0] }),
            let text = json["data"]?.string, let data = Data(base64Encoded: text),
            data.count == count * dtype.size
        else { throw damage("no numbers of the form \(shape)") }
        let numbers = MLXArray(data, shape, dtype: dtype).asType(.float32).asArray(Float.self)
        guard numbers.allSatisfy(\.isFinite) else { throw damage("numbers that are not finite") }
        return numbers
    }

    /// Each head's better order with so many slots, at the next point of the grid up.
    func saturations(_ slots: [Int], grid: [Int]) -> [Float] {
        zip(errors(upTo: spans.last!), slots).map { errors, slots in
            // At the whole text nothing is evicted, and no order is better: the point before tells.
            let point = min(
                grid.firstIndex { $0 >= slots } ?? grid.count - 1, max(grid.count - 2, 0))
            let best = orders.indices.min { errors[$0][point] < errors[$1][point] }!
            return orders[best]
        }
    }

    /// Frames of each layer for so many positions: made for the next context up, or for the longest.
    func frames(context: Int) -> [H2OFrame]? {
        let longer = frames.keys.filter { $0 >= context }
        return (longer.min() ?? frames.keys.max()).flatMap { frames[$0] }
    }
}
