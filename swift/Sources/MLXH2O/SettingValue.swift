import Foundation

/// A JSON value, whole numbers told from others: policies' settings and saved caches are made of it.
public enum H2OSettingValue: Sendable, Equatable {
    case null
    case bool(Bool)
    case int(Int)
    case double(Double)
    case string(String)
    case array([H2OSettingValue])
    case object([String: H2OSettingValue])

    /// The value of a JSON text.
    ///
    /// - Throws: ``H2OError/file(_:)`` for a text that is none.
    public init(parsing text: String) throws {
        do {
            self = try JSONDecoder().decode(H2OSettingValue.self, from: Data(text.utf8))
        } catch {
            throw H2OError.file("This is no JSON: \(error)")
        }
    }

    /// The value as JSON text, keys sorted.
    public var text: String {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.sortedKeys, .withoutEscapingSlashes]
        encoder.nonConformingFloatEncodingStrategy = .convertToString(
            positiveInfinity: "Infinity", negativeInfinity: "-Infinity", nan: "NaN")
        // All else can be encoded: keys are strings, and every number has a text.
        let data = try! encoder.encode(self)
        return String(decoding: data, as: UTF8.self)
    }

    /// A whole number, or nil.
    public var int: Int? {
        switch self {
        case .int(let value): value
        default: nil
        }
    }

    /// Any number, or nil.
    public var double: Double? {
        switch self {
        case .int(let value): Double(value)
        case .double(let value): value
        default: nil
        }
    }

    /// A truth value, or nil.
    public var bool: Bool? {
        if case .bool(let value) = self { value } else { nil }
    }

    /// A text, or nil.
    public var string: String? {
        if case .string(let value) = self { value } else { nil }
    }

    /// A list, or nil.
    public var array: [H2OSettingValue]? {
        if case .array(let value) = self { value } else { nil }
    }

    /// An object, or nil.
    public var object: [String: H2OSettingValue]? {
        if case .object(let value) = self { value } else { nil }
    }

    /// A member of an object; nil for what is no object or has no such member.
    public subscript(key: String) -> H2OSettingValue? { object?[key] }
}

extension H2OSettingValue: Codable {
    /// Decodes any JSON.
    public init(from decoder: any Decoder) throws {
        let container = try decoder.singleValueContainer()
        if container.decodeNil() {
            self = .null
        } else if let value = try? container.decode(Bool.self) {
            self = .bool(value)
        } else if let value = try? container.decode(Int.self) {
            self = .int(value)
        } else if let value = try? container.decode(Double.self) {
            self = .double(value)
        } else if let value = try? container.decode(String.self) {
            self = .string(value)
        } else if let value = try? container.decode([H2OSettingValue].self) {
            self = .array(value)
        } else {
            self = .object(try container.decode([String: H2OSettingValue].self))
        }
    }

    /// Encodes as the JSON it is.
    public func encode(to encoder: any Encoder) throws {
        var container = encoder.singleValueContainer()
        switch self {
        case .null: try container.encodeNil()
        case .bool(let value): try container.encode(value)
        case .int(let value): try container.encode(value)
        case .double(let value): try container.encode(value)
        case .string(let value): try container.encode(value)
        case .array(let value): try container.encode(value)
        case .object(let value): try container.encode(value)
        }
    }
}
